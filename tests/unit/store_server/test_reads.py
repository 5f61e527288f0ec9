"""Looking, reading, leasing, and waiting for layers that are still to come."""

import pytest

from kvcore import metrics
from kvcore.errors import RequestRefused
from kvcore.wire.messages import (
    Acquire,
    AcquireReply,
    Await,
    Commit,
    Exists,
    Lookup,
    Put,
    Read,
    Release,
    Renew,
    Status,
    StatusReply,
)
from store_server.core.layers import Ticket
from store_server.core.reads import Served
from store_server.core.store import Store
from tests.unit.store_server.model import (
    KIB,
    abort,
    acquire,
    check_invariants,
    commit,
    key,
    new_store,
    put,
    read,
    remove,
    reserve,
)


def take_finished(store: Store) -> Ticket:
    (ticket,) = store.waiters.finished
    store.waiters.finished.clear()
    return ticket


def finished_statuses(store: Store, now: float = 0.0) -> list[Status]:
    reply = store.reads.finish(take_finished(store), now)
    assert isinstance(reply, StatusReply)
    return [Status(code) for code in reply.statuses]


def test_lookup_counts_leading_hits_only() -> None:
    store = new_store()
    session = store.open_session()
    put(store, session, [key(1), key(2), key(4)], KIB)
    reply = store.reads.lookup(Lookup(9, [key(number) for number in (1, 2, 3, 4)]))
    assert (reply.id, reply.num_hits, reply.layers_ready) == (9, 2, [1, 1])
    assert store.counters[metrics.LOOKUP_HITS_TOTAL] == 2


def test_pending_blocks_are_hits_only_for_who_asks_for_them() -> None:
    store = new_store()
    session = store.open_session()
    reserve(store, session, [key(1)], 4 * KIB, num_layers=4)
    commit(store, session, [key(1)], 0, 3)
    assert store.reads.lookup(Lookup(1, [key(1)])).num_hits == 0
    assert store.reads.lookup(Lookup(1, [key(1)], include_pending=True)).layers_ready == [3]
    statuses = store.reads.exists(Exists(1, [key(1), key(2)])).statuses
    assert list(statuses) == [Status.PENDING, Status.MISSING]


def test_a_read_carries_checksums_of_its_layers_only() -> None:
    store = new_store()
    session = store.open_session()
    reserve(store, session, [key(1)], 4 * KIB, num_layers=4)
    store.writes.commit(session, Commit(1, [key(1)], 0, 2, [10, 11]), 0.0)
    store.writes.commit(session, Commit(1, [key(1)], 2, 4, [12, 13]), 0.0)
    put(store, session, [key(2)], KIB)
    served = store.reads.read(session, Read(1, [key(1), key(3), key(2)], 0, 1), 0.0)
    assert served is not None
    assert served.reply.checksums == [10, 0]
    served = store.reads.read(session, Read(1, [key(1)], 1, 3), 0.0)
    assert served is not None
    assert served.reply.checksums == [11, 12] and served.reply.num_layers == []
    served = store.reads.read(session, Read(1, [key(3), key(1), key(2)]), 0.0)
    assert served is not None
    assert served.reply.num_layers == [0, 4, 1]
    assert served.reply.sizes_bytes == [0, 4 * KIB, KIB]
    assert served.reply.checksums == [10, 11, 12, 13, 0]


def test_a_writer_that_leaves_out_a_checksum_has_given_none() -> None:
    store = new_store()
    session = store.open_session()
    reserve(store, session, [key(1)], 3 * KIB, num_layers=3)
    store.writes.commit(session, Commit(1, [key(1)], 0, 1, [10]), 0.0)
    store.writes.commit(session, Commit(1, [key(1)], 1, 2), 0.0)
    store.writes.commit(session, Commit(1, [key(1)], 2, 3, [12]), 0.0)
    served = store.reads.read(session, Read(1, [key(1)]), 0.0)
    assert served is not None and served.reply.checksums == []


def test_bytes_being_sent_are_not_reused_when_their_object_goes() -> None:
    store = new_store(256 * KIB, slab_bytes=64 * KIB)
    session = store.open_session()
    put(store, session, [key(1)], 60 * KIB)
    served = store.reads.read(session, Read(1, [key(1)]), 0.0)
    assert served is not None
    assert remove(store, [key(1)]) == [Status.OK]
    assert read(store, session, [key(1)]) == [Status.MISSING]
    for number in range(2, 20):
        put(store, session, [key(number)], 60 * KIB)
        check_invariants(store)
    sent = served.spans[0][0]
    assert all(sent not in obj.extents[::2] for obj in store.catalog.by_key.values())
    store.space.release(served.objects)
    check_invariants(store)


def test_neighbouring_objects_are_sent_as_one_piece() -> None:
    store = new_store(1 << 30)
    session = store.open_session()
    put(store, session, [key(number) for number in range(32)], 4 * KIB)
    served = store.reads.read(session, Read(1, [key(number) for number in range(32)]), 0.0)
    assert served is not None
    assert [size for _, size in served.spans] == [128 * KIB]


def test_a_payload_over_the_limit_is_refused_and_holds_nothing() -> None:
    store = new_store(max_payload_bytes=8 * KIB)
    session = store.open_session()
    put(store, session, [key(1), key(2), key(3)], 4 * KIB)
    with pytest.raises(RequestRefused, match="fewer keys"):
        store.reads.read(session, Read(1, [key(1), key(2), key(3)]), 0.0)
    assert remove(store, [key(1)]) == [Status.OK]
    check_invariants(store)


def test_a_lease_keeps_bytes_until_release() -> None:
    store = new_store()
    session = store.open_session()
    session.is_mapped = True
    put(store, session, [key(1)], KIB)
    reply = store.reads.acquire(session, Acquire(1, [key(1), key(2)], 1000), 0.0)
    assert reply is not None and reply.lease > 0
    assert [grant.status for grant in reply.grants] == [Status.OK, Status.MISSING]
    assert remove(store, [key(1)]) == [Status.LEASED]
    assert remove(store, [key(1)], force=True) == [Status.OK]
    assert store.space.allocator.used_bytes > 0
    store.reads.release(session, Release(2, reply.lease))
    assert store.space.allocator.used_bytes == 0


def test_leases_end_in_the_next_acquire_but_only_those_of_the_same_session() -> None:
    store = new_store()
    session, other = store.open_session(), store.open_session()
    put(store, session, [key(1), key(2)], KIB)
    first = acquire(store, session, [key(1)])
    foreign = acquire(store, other, [key(1)])
    store.reads.acquire(session, Acquire(2, [key(2)], 1000, release=[first, foreign, 999]), 0.0)
    assert first not in session.lease_numbers
    assert foreign in other.lease_numbers


def test_nothing_found_is_no_lease() -> None:
    store = new_store()
    assert acquire(store, store.open_session(), [key(1)]) == 0
    assert len(store.leases) == 0


def test_a_lease_ends_by_time_unless_it_is_renewed() -> None:
    store = new_store()
    session, stranger = store.open_session(), store.open_session()
    put(store, session, [key(1)], KIB)
    lease = acquire(store, session, [key(1)], now=10.0)
    store.reads.renew(session, Renew(1, lease, 5000), 10.5)
    with pytest.raises(RequestRefused, match="over"):
        store.reads.renew(stranger, Renew(1, lease, 5000), 10.5)
    store.expire(12.0)
    assert len(store.leases) == 1 and store.agenda.earliest == 15.5
    store.expire(15.5)
    assert len(store.leases) == 0 and store.counters[metrics.LEASES_EXPIRED_TOTAL] == 1
    with pytest.raises(RequestRefused, match="over"):
        store.reads.renew(session, Renew(1, lease, 5000), 16.0)
    assert remove(store, [key(1)]) == [Status.OK]


def test_a_closed_session_ends_its_leases_and_waits() -> None:
    store = new_store()
    session = store.open_session()
    put(store, session, [key(1)], KIB)
    acquire(store, session, [key(1)])
    assert store.reads.read(session, Read(1, [key(2)], wait_ms=1000), 0.0) is None
    store.close_session(session)
    assert len(store.leases) == 0 and len(store.waiters) == 0
    put(store, store.open_session(), [key(2)], KIB)
    assert store.waiters.finished == []


def test_a_reader_follows_a_writer_that_has_not_begun() -> None:
    store = new_store()
    writer, reader = store.open_session(), store.open_session()
    request = Read(5, [key(1), key(2)], 0, 1, wait_ms=1000)
    assert store.reads.read(reader, request, 0.0) is None
    reserve(store, writer, [key(1), key(2)], 4 * KIB, num_layers=2)
    commit(store, writer, [key(1)], 0, 1)
    assert store.waiters.finished == []
    commit(store, writer, [key(2)], 0, 1)
    served = store.reads.finish(take_finished(store), 0.0)
    assert isinstance(served, Served)
    assert served.reply.id == 5 and list(served.reply.statuses) == [Status.OK, Status.OK]
    assert store.counters[metrics.LAYERS_READ_BEFORE_SEAL_TOTAL] == 2
    assert len(store.waiters) == 0


def test_waiting_for_all_layers_waits_for_the_seal() -> None:
    store = new_store()
    writer, reader = store.open_session(), store.open_session()
    assert store.reads.await_layers(reader, Await(1, [key(1)], 0, 1000), 0.0) is None
    reserve(store, writer, [key(1)], 4 * KIB, num_layers=2)
    commit(store, writer, [key(1)], 0, 1)
    assert store.waiters.finished == []
    commit(store, writer, [key(1)], 1, 2)
    assert finished_statuses(store) == [Status.OK]


@pytest.mark.parametrize("how", ["abort", "close", "timeout", "remove"])
def test_waiters_learn_that_the_writer_gave_up(how: str) -> None:
    store = new_store()
    writer, reader = store.open_session(), store.open_session()
    reserve(store, writer, [key(1)], KIB, now=0.0)
    assert store.reads.await_layers(reader, Await(1, [key(1)], 1, 60_000), 0.0) is None
    if how == "abort":
        abort(store, writer, [key(1)])
    elif how == "close":
        store.close_session(writer)
    elif how == "timeout":
        store.expire(30.0)
    else:
        assert remove(store, [key(1)]) == [Status.PENDING]
        assert remove(store, [key(1)], force=True) == [Status.OK]
    assert finished_statuses(store) == [Status.ABANDONED]
    check_invariants(store)


def test_an_abort_wakes_who_waits_for_a_key_nobody_reserved() -> None:
    store = new_store()
    writer, reader = store.open_session(), store.open_session()
    assert store.reads.await_layers(reader, Await(1, [key(1)], 1, 1000), 0.0) is None
    abort(store, writer, [key(1)])
    assert finished_statuses(store) == [Status.ABANDONED]


def test_who_asks_just_after_an_abort_does_not_wait() -> None:
    store = new_store()
    writer, reader = store.open_session(), store.open_session()
    abort(store, writer, [key(1)])
    reply = store.reads.await_layers(reader, Await(1, [key(1)], 1, 60_000), 1.9)
    assert reply is not None
    assert list(reply.statuses) == [Status.ABANDONED]
    # Together with a key that may still come, only that one is waited for.
    assert store.reads.await_layers(reader, Await(2, [key(1), key(2)], 1, 60_000), 1.9) is None
    reserve(store, writer, [key(2)], KIB)
    commit(store, writer, [key(2)], 0, 1)
    assert finished_statuses(store) == [Status.ABANDONED, Status.OK]
    # Long after, or with a new writer, it is waited for again.
    assert store.reads.await_layers(reader, Await(3, [key(1)], 1, 60_000), 2.1) is None
    abort(store, writer, [key(3)])
    reserve(store, writer, [key(3)], KIB)
    assert store.reads.await_layers(reader, Await(4, [key(3)], 1, 60_000), 0.1) is None
    check_invariants(store)


def test_a_wait_ends_in_time() -> None:
    store = new_store()
    session = store.open_session()
    put(store, session, [key(1)], KIB)
    assert store.reads.await_layers(session, Await(1, [key(1), key(2)], 1, 250), 1.0) is None
    assert store.agenda.earliest == 1.25
    store.expire(1.2)
    assert store.waiters.finished == []
    store.expire(1.25)
    assert finished_statuses(store, 1.25) == [Status.OK, Status.TIMED_OUT]


def test_more_layers_than_the_object_has_is_invalid_also_for_waiters() -> None:
    store = new_store()
    writer, reader = store.open_session(), store.open_session()
    assert store.reads.await_layers(reader, Await(1, [key(1)], 5, 1000), 0.0) is None
    reserve(store, writer, [key(1)], 4 * KIB, num_layers=4)
    assert finished_statuses(store) == [Status.INVALID]
    reply = store.reads.await_layers(reader, Await(1, [key(1)], 5, 1000), 0.0)
    assert reply is not None and list(reply.statuses) == [Status.INVALID]


def test_an_acquire_may_wait_as_well() -> None:
    store = new_store()
    writer, reader = store.open_session(), store.open_session()
    reader.is_mapped = True
    assert store.reads.acquire(reader, Acquire(1, [key(1)], 1000, 0, 500), 0.0) is None
    put(store, writer, [key(1)], KIB)
    reply = store.reads.finish(take_finished(store), 0.0)
    assert isinstance(reply, AcquireReply)
    assert reply.lease > 0 and sum(reply.grants[0].extents[1::2]) == KIB


def test_grants_pad_checksums_to_all_layers() -> None:
    store = new_store()
    session = store.open_session()
    session.is_mapped = True
    reserve(store, session, [key(1)], 3 * KIB, num_layers=3)
    store.writes.commit(session, Commit(1, [key(1)], 0, 1, [10]), 0.0)
    reply = store.reads.acquire(session, Acquire(1, [key(1)], 1000, 1), 0.0)
    assert reply is not None
    assert reply.grants[0].checksums == [10, 0, 0] and reply.grants[0].layers_ready == 1


def test_existence_probes_never_block_writers() -> None:
    store = new_store(256 * KIB, slab_bytes=64 * KIB)
    session = store.open_session()
    for number in range(64):
        put(store, session, [key(number)], 16 * KIB)
        known = [key(other) for other in range(number + 1)]
        store.reads.exists(Exists(1, known))
        store.reads.lookup(Lookup(1, known))
    assert store.counters[metrics.RESERVE_FULL_TOTAL] == 0
    assert put(store, session, [key(1000)], 16 * KIB) == [Status.OK]


def test_an_unused_put_holds_its_bytes_until_it_is_received() -> None:
    store = new_store()
    session = store.open_session()
    incoming = store.writes.put_begin(session, Put(1, [key(1)], [KIB]), 0.0)
    assert read(store, session, [key(1)]) == [Status.PENDING]
    store.close_session(session)
    store.writes.interrupted(session, incoming)
    assert store.space.allocator.used_bytes == 0
