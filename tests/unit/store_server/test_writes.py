"""Reserve, commit, seal; and every way in which a writer may fail to."""

import pytest

from kvcore import metrics
from kvcore.errors import RequestRefused
from kvcore.wire.messages import Commit, Put, Reserve, Status, Write
from tests.unit.store_server.model import (
    KIB,
    abort,
    check_invariants,
    commit,
    key,
    new_store,
    put,
    read,
    reserve,
    write,
)


def test_a_put_is_readable_at_once() -> None:
    store = new_store()
    session = store.open_session()
    assert put(store, session, [key(1), key(2)], 4 * KIB) == [Status.OK, Status.OK]
    assert read(store, session, [key(1), key(2), key(3)]) == [Status.OK, Status.OK, Status.MISSING]
    assert store.counters[metrics.WRITTEN_BYTES_TOTAL] == 8 * KIB
    check_invariants(store)


def test_of_two_writers_the_first_wins() -> None:
    store = new_store()
    first, second = store.open_session(), store.open_session()
    assert reserve(store, first, [key(1)], KIB) == [Status.OK]
    assert reserve(store, second, [key(1)], KIB) == [Status.PENDING]
    assert put(store, second, [key(1)], KIB) == [Status.PENDING]
    assert write(store, second, [key(1)], 0, 1, KIB) == [Status.INVALID]
    assert write(store, first, [key(1)], 0, 1, KIB) == [Status.OK]
    assert put(store, second, [key(1)], KIB) == [Status.EXISTS]
    check_invariants(store)


def test_a_key_twice_in_one_put_is_written_once() -> None:
    store = new_store()
    session = store.open_session()
    assert put(store, session, [key(1), key(1)], KIB) == [Status.OK, Status.PENDING]
    check_invariants(store)


def test_layers_become_readable_in_order() -> None:
    store = new_store()
    writer, reader = store.open_session(), store.open_session()
    assert reserve(store, writer, [key(1)], 8 * KIB, num_layers=4) == [Status.OK]
    assert read(store, reader, [key(1)], 0, 1) == [Status.PENDING]
    assert write(store, writer, [key(1)], 1, 2, 2 * KIB) == [Status.INVALID], "a gap"
    assert write(store, writer, [key(1)], 0, 2, 4 * KIB) == [Status.OK]
    assert read(store, reader, [key(1)], 0, 2) == [Status.OK]
    assert read(store, reader, [key(1)], 1, 3) == [Status.PENDING]
    assert read(store, reader, [key(1)]) == [Status.PENDING]
    assert store.counters[metrics.LAYERS_READ_BEFORE_SEAL_TOTAL] == 2
    assert write(store, writer, [key(1)], 0, 2, 4 * KIB) == [Status.INVALID], "twice"
    assert commit(store, writer, [key(1)], 2, 4) == [Status.OK]
    assert read(store, reader, [key(1)]) == [Status.OK]
    assert read(store, reader, [key(1)], 0, 5) == [Status.INVALID]
    assert store.counters[metrics.LAYERS_READ_BEFORE_SEAL_TOTAL] == 2
    assert store.stats()[metrics.OBJECTS_PENDING] == 0


def test_a_closed_session_leaves_nothing_behind() -> None:
    store = new_store()
    writer, reader = store.open_session(), store.open_session()
    reserve(store, writer, [key(1), key(2)], 8 * KIB, num_layers=2)
    write(store, writer, [key(1)], 0, 1, 4 * KIB)
    interrupted = store.writes.write_begin(writer, Write(1, [key(1)], 1, 2), 4 * KIB)
    store.close_session(writer)
    assert read(store, reader, [key(1), key(2)], 0, 1) == [Status.MISSING, Status.MISSING]
    check_invariants(store)
    assert store.space.allocator.used_bytes > 0, "bytes that are still being received must not be reused"
    store.writes.interrupted(writer, interrupted)
    assert store.space.allocator.used_bytes == 0
    assert store.stats()[metrics.OBJECTS_PENDING] == 0
    assert store.counters[metrics.OBJECTS_ABANDONED_TOTAL] == 2


def test_a_reservation_without_progress_is_abandoned() -> None:
    store = new_store(reservation_timeout_ms=30_000)
    session = store.open_session()
    reserve(store, session, [key(1), key(2)], 4 * KIB, num_layers=4, now=100.0)
    assert store.agenda.earliest == 130.0
    commit(store, session, [key(2)], 0, 1, now=120.0)
    store.expire(130.0)
    assert store.agenda.earliest == 150.0
    assert write(store, session, [key(1)], 0, 1, KIB) == [Status.ABANDONED]
    assert commit(store, session, [key(2)], 1, 4, now=149.0) == [Status.OK]
    check_invariants(store)


def test_a_late_payload_of_an_abandoned_reservation_hurts_nobody() -> None:
    store = new_store()
    session = store.open_session()
    reserve(store, session, [key(1)], KIB, now=0.0)
    incoming = store.writes.write_begin(session, Write(1, [key(1)], 0, 1), KIB)
    store.expire(31.0)
    assert put(store, store.open_session(), [key(1)], KIB) == [Status.OK]
    reply = store.writes.received(session, incoming, (), 32.0)
    assert list(reply.statuses) == [Status.INVALID]
    check_invariants(store)


def test_an_abort_by_the_writer_frees_and_by_others_does_not() -> None:
    store = new_store()
    writer, other = store.open_session(), store.open_session()
    reserve(store, writer, [key(1)], KIB)
    assert abort(store, other, [key(1)]) == [Status.INVALID]
    assert abort(store, writer, [key(1), key(9)]) == [Status.OK, Status.OK]
    assert store.space.allocator.used_bytes == 0


def test_extents_are_handed_out_only_to_who_has_direct_access() -> None:
    store = new_store()
    session = store.open_session()
    reply = store.writes.reserve(session, Reserve(1, [key(1)], [KIB]), 0.0)
    assert reply.grants[0].extents == []
    session.is_mapped = True
    reply = store.writes.reserve(session, Reserve(1, [key(2)], [KIB]), 0.0)
    assert sum(reply.grants[0].extents[1::2]) == KIB
    session.is_mapped, session.num_queue_pairs = False, 1
    reply = store.writes.reserve(session, Reserve(1, [key(3)], [KIB]), 0.0)
    assert sum(reply.grants[0].extents[1::2]) == KIB


@pytest.mark.parametrize("ending", ["mapping", "abort", "commit"])
def test_extents_of_a_writer_that_overran_are_quarantined_until_it_cannot_write(ending: str) -> None:
    store = new_store()
    session = store.open_session()
    session.is_mapped = True
    reserve(store, session, [key(1)], KIB, now=0.0)
    store.expire(31.0)
    assert store.stats()[metrics.QUARANTINED_BYTES] == KIB
    assert store.space.allocator.used_bytes > 0
    check_invariants(store)
    if ending == "mapping":
        store.close_session(session)
        assert store.stats()[metrics.QUARANTINED_BYTES] == KIB
        session.is_mapped = False
        store.writes.access_ended(session)
    elif ending == "abort":
        assert abort(store, session, [key(1)]) == [Status.OK]
    else:
        assert commit(store, session, [key(1)], 0, 1) == [Status.ABANDONED]
    assert store.stats()[metrics.QUARANTINED_BYTES] == 0
    assert store.space.allocator.used_bytes == 0


def test_a_mapped_writer_that_vanishes_is_quarantined_but_its_leases_are_not() -> None:
    store = new_store()
    session = store.open_session()
    put(store, session, [key(1)], KIB)
    session.is_mapped = True
    reserve(store, session, [key(2)], KIB)
    store.close_session(session)
    assert store.stats()[metrics.QUARANTINED_BYTES] == KIB
    session.is_mapped = False
    store.writes.access_ended(session)
    assert store.stats()[metrics.QUARANTINED_BYTES] == 0
    check_invariants(store)


def test_the_quarantine_ends_with_the_last_way_to_write() -> None:
    store = new_store()
    session = store.open_session()
    session.is_mapped, session.num_queue_pairs = True, 2
    reserve(store, session, [key(1)], KIB)
    store.close_session(session)
    for session.is_mapped, session.num_queue_pairs in ((True, 0), (False, 2), (False, 1)):
        store.writes.access_ended(session)
        assert store.stats()[metrics.QUARANTINED_BYTES] == KIB
    session.num_queue_pairs = 0
    store.writes.access_ended(session)
    assert store.stats()[metrics.QUARANTINED_BYTES] == 0
    assert store.space.allocator.used_bytes == 0


def test_corrupt_bytes_are_dropped() -> None:
    store = new_store()
    session = store.open_session()
    incoming = store.writes.put_begin(session, Put(1, [key(1), key(2)], [KIB, KIB], [7, 8]), 0.0)
    reply = store.writes.received(session, incoming, [1], 0.0)
    assert list(reply.statuses) == [Status.OK, Status.CORRUPT]
    assert read(store, session, [key(1), key(2)]) == [Status.OK, Status.MISSING]
    assert store.counters[metrics.CORRUPT_TOTAL] == 1
    check_invariants(store)


@pytest.mark.parametrize(("size", "layers"), [(0, 1), (-5, 1), (10, 3), (10, 0), (10, -1)])
def test_sizes_that_make_no_sense_are_refused_by_key(size: int, layers: int) -> None:
    store = new_store()
    assert reserve(store, store.open_session(), [key(1)], size, layers) == [Status.INVALID]
    assert reserve(store, store.open_session(), [b"", b"x" * 256], 10) == [Status.INVALID] * 2


def test_a_write_with_another_share_is_invalid_and_hurts_no_other_key() -> None:
    store = new_store()
    session = store.open_session()
    reserve(store, session, [key(1)], 2 * KIB)
    reserve(store, session, [key(2)], KIB)
    assert write(store, session, [key(1), key(2), key(3)], 0, 1, KIB) == [
        Status.INVALID,
        Status.OK,
        Status.ABANDONED,
    ]
    check_invariants(store)


def test_malformed_requests_name_what_is_wrong() -> None:
    store = new_store()
    session = store.open_session()
    with pytest.raises(RequestRefused, match="2 sizes for 3 keys"):
        store.writes.reserve(session, Reserve(1, [b"a", b"b", b"c"], [1, 2]), 0.0)
    with pytest.raises(RequestRefused, match="1 sizes for 2 keys"):
        store.writes.put_begin(session, Put(1, [b"a", b"b"], [1]), 0.0)
    with pytest.raises(RequestRefused, match="3 checksums where 1"):
        store.writes.put_begin(session, Put(1, [b"a"], [1], [1, 2, 3]), 0.0)
    with pytest.raises(RequestRefused, match="64-bit"):
        store.writes.commit(session, Commit(1, [b"a"], 0, 1, [-1]), 0.0)
    with pytest.raises(RequestRefused, match="equal shares"):
        store.writes.write_begin(session, Write(1, [b"a", b"b"], 0, 1), 3)
    with pytest.raises(RequestRefused, match="no layers"):
        store.writes.commit(session, Commit(1, [b"a"], 2, 2), 0.0)
    assert store.space.allocator.used_bytes == 0
