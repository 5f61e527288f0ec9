"""Spill before forgetting, promotion on hit, writers that wait: the core over a cold tier made of dicts."""

import pytest

from kvcore import metrics
from kvcore.wire.messages import (
    Acquire,
    Await,
    Exists,
    ListKeys,
    Lookup,
    Pin,
    PinKind,
    Put,
    Read,
    Reserve,
    Status,
    Tier,
)
from store_server.core.objects import Session
from store_server.core.reads import Served
from store_server.core.store import Store
from tests.unit.store_server.fake_cold import FakeCold, new_tiered_store
from tests.unit.store_server.model import (
    KIB,
    check_invariants,
    commit,
    key,
    put,
    read,
    remove,
    reserve,
)

OBJECT_BYTES = 32 * KIB
FITTING = 31  # of the 32 objects of this size that a pool of 1 MiB has chunks for; bookkeeping takes the rest


@pytest.fixture
def cold() -> FakeCold:
    return FakeCold()


@pytest.fixture
def store(cold: FakeCold) -> Store:
    return new_tiered_store(cold)


@pytest.fixture
def session(store: Store) -> Session:
    return store.open_session()


def fill(store: Store, session: Session, first: int, count: int) -> list[Status]:
    return [put(store, session, [key(number)], OBJECT_BYTES)[0] for number in range(first, first + count)]


def lookup(store: Store, numbers: range) -> tuple[int, list[Tier]]:
    reply = store.reads.lookup(Lookup(1, [key(number) for number in numbers]))
    return reply.num_hits, [Tier(tier) for tier in reply.tiers]


def fill_and_spill(store: Store, cold: FakeCold, session: Session, count: int) -> None:
    """Puts as a client does that waits for room."""
    for number in range(count):
        request = Put(1, [key(number)], [OBJECT_BYTES])
        while (incoming := store.writes.put_begin(session, request, 0.0, may_wait=True)) is None:
            cold.finish_writes(store)
        (status,) = store.writes.received(session, incoming, (), 0.0).statuses
        assert status in (Status.OK, Status.EXISTS)
        check_invariants(store)


def test_a_full_pool_writes_back_and_keeps_everything_readable(
    store: Store, cold: FakeCold, session: Session
) -> None:
    assert fill(store, session, 0, FITTING) == [Status.OK] * FITTING
    assert not cold.writing
    assert fill(store, session, 50, 1) == [Status.FULL]
    assert cold.writing and store.space.is_making_room
    assert lookup(store, range(FITTING)) == (FITTING, [Tier.DRAM] * FITTING)
    cold.finish_writes(store)
    assert fill(store, session, 50, 1) == [Status.OK]
    num_hits, tiers = lookup(store, range(FITTING))
    assert num_hits == FITTING and tiers.count(Tier.SSD) == 1
    check_invariants(store)


def test_twice_the_pool_nothing_is_lost_and_nothing_rejected(
    store: Store, cold: FakeCold, session: Session
) -> None:
    fill_and_spill(store, cold, session, 3 * FITTING)
    assert lookup(store, range(3 * FITTING))[0] == 3 * FITTING
    assert store.counters[metrics.RESERVE_FULL_TOTAL] == 0


def test_a_reservation_waits_for_room_and_its_keys_stay_free_meanwhile(
    store: Store, cold: FakeCold, session: Session
) -> None:
    fill(store, session, 0, FITTING)
    request = Reserve(1, [key(100), key(101)], [OBJECT_BYTES])
    assert store.writes.reserve(session, request, 0.0, may_wait=True) is None
    assert store.writes.num_pending == 0 and key(100) not in store.catalog.by_key
    cold.finish_writes(store)
    reply = store.writes.reserve(session, request, 0.0, may_wait=True)
    assert reply is not None and [grant.status for grant in reply.grants] == [Status.OK] * 2
    check_invariants(store)


def test_without_waiting_the_answer_is_full(store: Store, cold: FakeCold, session: Session) -> None:
    fill(store, session, 0, FITTING)
    assert reserve(store, session, [key(100)], OBJECT_BYTES) == [Status.FULL]
    assert store.counters[metrics.RESERVE_FULL_TOTAL] == 1


def test_a_busy_disk_bounds_what_is_under_way(session: Session, store: Store, cold: FakeCold) -> None:
    cold.queue_objects = 3
    fill(store, session, 0, FITTING)
    assert fill(store, session, 50, 1) == [Status.FULL]
    assert len(cold.writing) == 3
    cold.finish_writes(store, 1)
    assert fill(store, session, 50, 2) == [Status.OK, Status.FULL]
    check_invariants(store)


def test_when_the_disk_refuses_objects_are_forgotten_as_without_one(
    store: Store, cold: FakeCold, session: Session
) -> None:
    cold.is_refusing = True
    assert fill(store, session, 0, 2 * FITTING) == [Status.OK] * (2 * FITTING)
    assert lookup(store, range(1))[0] == 0
    assert not store.space.is_making_room
    check_invariants(store)


def test_a_failed_write_gives_the_object_up(store: Store, cold: FakeCold, session: Session) -> None:
    fill(store, session, 0, FITTING)
    fill(store, session, 50, 1)
    victims = {obj.key for obj in cold.writing}
    cold.finish_writes(store, status=Status.FULL)
    assert fill(store, session, 50, 1) == [Status.OK]
    assert not victims & set(store.catalog.by_key)
    check_invariants(store)


def test_what_is_used_while_it_departs_stays(store: Store, cold: FakeCold, session: Session) -> None:
    fill(store, session, 0, FITTING)
    fill(store, session, 50, 1)
    used = cold.writing[0].key
    assert read(store, session, [used]) == [Status.OK]
    cold.finish_writes(store)
    assert fill(store, session, 50, 1) == [Status.OK]
    assert used in store.catalog.by_key and cold.writing == []
    check_invariants(store)


def test_what_is_on_disk_already_is_not_written_again(store: Store, cold: FakeCold, session: Session) -> None:
    fill_and_spill(store, cold, session, FITTING + 5)
    bring_back(store, cold, session, 0)
    written = len(cold.stored)
    fill_and_spill(store, cold, session, FITTING + 5)
    assert len(cold.stored) == written


def bring_back(store: Store, cold: FakeCold, session: Session, number: int) -> None:
    assert store.reads.read(session, Read(1, [key(number)]), 0.0) is None
    while key(number) not in {obj.key for obj in cold.loading}:
        cold.finish_writes(store)
    cold.finish_loads(store)
    (ticket,) = store.waiters.finished
    store.waiters.finished.clear()
    served = store.reads.finish(ticket, 0.0)
    assert isinstance(served, Served) and served.reply.statuses == bytes([Status.OK])
    assert served.reply.checksums == [7]
    store.space.release(served.objects)


def test_a_read_of_what_is_on_disk_waits_for_it_and_gets_it(
    store: Store, cold: FakeCold, session: Session
) -> None:
    fill_and_spill(store, cold, session, FITTING + 5)
    assert lookup(store, range(1)) == (1, [Tier.SSD])
    bring_back(store, cold, session, 0)
    assert lookup(store, range(1)) == (1, [Tier.DRAM])
    assert store.counters[metrics.PROMOTED_OBJECTS_TOTAL] == 1
    check_invariants(store)


def test_while_it_is_coming_it_counts_as_there(store: Store, cold: FakeCold, session: Session) -> None:
    fill_and_spill(store, cold, session, FITTING + 5)
    assert store.reads.acquire(session, Acquire(1, [key(0)], 1000), 0.0) is None
    assert lookup(store, range(1)) == (1, [Tier.SSD])
    assert store.reads.exists(Exists(1, [key(0)])).statuses == bytes([Status.OK])
    assert reserve(store, session, [key(0)], OBJECT_BYTES) == [Status.EXISTS]


def test_two_readers_of_one_object_load_it_once(store: Store, cold: FakeCold, session: Session) -> None:
    fill_and_spill(store, cold, session, FITTING + 5)
    cold.finish_writes(store)
    other = store.open_session()
    assert store.reads.read(session, Read(1, [key(0)]), 0.0) is None
    assert store.reads.read(other, Read(2, [key(0)]), 0.0) is None
    assert [obj.key for obj in cold.loading] == [key(0)]
    cold.finish_loads(store)
    assert len(store.waiters.finished) == 2


@pytest.mark.parametrize("status", [Status.CORRUPT, Status.MISSING])
def test_what_cannot_be_read_back_is_a_miss(
    store: Store, cold: FakeCold, session: Session, status: Status
) -> None:
    fill_and_spill(store, cold, session, FITTING + 5)
    cold.finish_writes(store)
    assert store.reads.read(session, Read(1, [key(0)]), 0.0) is None
    cold.finish_loads(store, status=status)
    (ticket,) = store.waiters.finished
    served = store.reads.finish(ticket, 0.0)
    assert isinstance(served, Served)
    assert served.reply.statuses == bytes([status]) and served.payload_bytes == 0
    check_invariants(store)


def test_a_reader_does_not_wait_for_a_slow_disk_for_ever(
    store: Store, cold: FakeCold, session: Session
) -> None:
    fill_and_spill(store, cold, session, FITTING + 5)
    cold.finish_writes(store)
    assert store.reads.read(session, Read(1, [key(0)]), 10.0) is None
    store.expire(13.9)
    assert not store.waiters.finished
    store.expire(14.1)
    (ticket,) = store.waiters.finished
    served = store.reads.finish(ticket, 14.1)
    assert isinstance(served, Served) and served.reply.statuses == bytes([Status.TIMED_OUT])
    cold.finish_loads(store)
    assert lookup(store, range(1)) == (1, [Tier.DRAM])
    check_invariants(store)


def test_a_read_of_both_tiers_keeps_what_is_in_dram(store: Store, cold: FakeCold, session: Session) -> None:
    fill_and_spill(store, cold, session, FITTING + 5)
    cold.finish_writes(store)
    hot = next(
        number for number in range(FITTING + 5) if lookup(store, range(number, number + 1))[1] == [Tier.DRAM]
    )
    request = Read(1, [key(0), key(hot)])
    assert store.reads.read(session, request, 0.0) is None
    cold.finish_writes(store)
    cold.finish_loads(store)
    (ticket,) = store.waiters.finished
    served = store.reads.finish(ticket, 0.0)
    assert isinstance(served, Served) and served.reply.statuses == bytes(2)


def test_removal_reaches_every_copy(store: Store, cold: FakeCold, session: Session) -> None:
    fill_and_spill(store, cold, session, FITTING + 5)
    cold.finish_writes(store)
    hot = key(FITTING + 4)
    assert store.reads.read(session, Read(1, [key(1)]), 0.0) is None  # on its way
    store.space.evict_some(3, 64 * KIB)
    writing = [obj.key for obj in cold.writing][:1]
    names = [key(0), key(1), hot, *writing]
    assert remove(store, [*names, key(999)]) == [Status.OK] * len(names) + [Status.MISSING]
    cold.finish_writes(store)
    cold.finish_loads(store)
    assert store.reads.exists(Exists(1, names)).statuses == bytes([Status.MISSING]) * len(names)
    assert not set(names) & (set(cold.stored) | set(store.catalog.by_key))
    (ticket,) = store.waiters.finished
    assert ticket.outcomes == {key(1): Status.MISSING}
    check_invariants(store)


def test_a_name_can_be_written_again_after_its_removal(
    store: Store, cold: FakeCold, session: Session
) -> None:
    fill_and_spill(store, cold, session, FITTING + 5)
    cold.finish_writes(store)
    assert put(store, session, [key(0)], OBJECT_BYTES) == [Status.EXISTS]
    remove(store, [key(0)])
    assert put(store, session, [key(0)], OBJECT_BYTES) == [Status.OK]


def test_pinning_brings_an_object_back_and_keeps_it(store: Store, cold: FakeCold, session: Session) -> None:
    fill_and_spill(store, cold, session, FITTING + 5)
    cold.finish_writes(store)
    assert store.upkeep.pin(Pin(1, [key(0)], PinKind.HARD), 0.0).statuses == bytes([Status.OK])
    cold.finish_loads(store)
    fill_and_spill(store, cold, session, 3 * FITTING)
    assert store.catalog.by_key[key(0)].pin == PinKind.HARD
    check_invariants(store)


def test_what_the_disk_lost_is_written_back_again(store: Store, cold: FakeCold, session: Session) -> None:
    fill(store, session, 0, FITTING)
    fill(store, session, 50, 1)
    cold.finish_writes(store)
    ready = list(cold.stored)
    cold.lose(store, ready)
    check_invariants(store)
    fill_and_spill(store, cold, session, FITTING + 5)
    cold.finish_writes(store)
    assert all(name in cold.stored or name in store.catalog.by_key for name in ready)


def test_background_eviction_cleans_ahead_and_forgets_nothing(cold: FakeCold) -> None:
    store = new_tiered_store(cold, high_watermark=0.9, low_watermark=0.5)
    session = store.open_session()
    fill(store, session, 0, 29)
    assert store.space.is_above_high_watermark
    objects, size_bytes, is_done = store.space.evict_some(1000)
    assert is_done and size_bytes == objects * OBJECT_BYTES >= 0.4 * (1 << 20)
    assert not store.space.is_above_high_watermark
    cold.finish_writes(store)
    assert lookup(store, range(29)) == (29, [Tier.DRAM] * 29)
    # Now there is room at once.
    assert fill(store, session, 100, 10) == [Status.OK] * 10
    assert lookup(store, range(29))[0] == 29
    check_invariants(store)


def test_saving_writes_everything_back_pinned_or_not(store: Store, cold: FakeCold, session: Session) -> None:
    fill(store, session, 0, 10)
    store.upkeep.pin(Pin(1, [key(3)], PinKind.HARD), 0.0)
    reserve(store, session, [key(50)], OBJECT_BYTES)
    for obj in store.space.dram_only():
        store.space.save(obj)
    cold.finish_writes(store)
    assert set(cold.stored) == {key(number) for number in range(10)}
    assert store.space.dram_only() == []


def test_listing_shows_both_tiers_once(store: Store, cold: FakeCold, session: Session) -> None:
    fill_and_spill(store, cold, session, FITTING + 5)
    cold.finish_writes(store)
    reply = store.upkeep.list_keys(ListKeys(1, 0, 1000))
    assert [info.key for info in reply.keys].count(key(0)) == 1
    assert {info.key for info in reply.keys} == {key(number) for number in range(FITTING + 5)}
    assert {info.tier for info in reply.keys} == {Tier.DRAM, Tier.SSD}
    assert all(info.layers_ready == info.num_layers for info in reply.keys)


def test_layers_of_an_object_come_back_together(store: Store, cold: FakeCold, session: Session) -> None:
    assert reserve(store, session, [key(200)], OBJECT_BYTES, num_layers=4) == [Status.OK]
    commit(store, session, [key(200)], 0, 4)
    fill_and_spill(store, cold, session, 2 * FITTING)
    assert lookup(store, range(200, 201)) == (1, [Tier.SSD])
    assert store.reads.read(session, Read(1, [key(200)], 1, 3), 0.0) is None
    while not cold.loading:
        cold.finish_writes(store)
    cold.finish_loads(store)
    (ticket,) = store.waiters.finished
    served = store.reads.finish(ticket, 0.0)
    assert isinstance(served, Served) and served.payload_bytes == OBJECT_BYTES // 2


def test_waiting_writers_are_served_in_turn_and_not_for_ever(cold: FakeCold) -> None:
    store = new_tiered_store(cold)
    session, gone = store.open_session(), store.open_session()
    served: list[str] = []

    def attempt(name: str, succeeds: bool) -> object:
        def attempt_it(is_last: bool) -> bool:
            if succeeds or is_last:
                served.append(f"{name} {is_last}")
            return succeeds

        return attempt_it

    store.room.park(gone, attempt("gone", True), 0.0)  # type: ignore[arg-type]
    store.room.park(session, attempt("first", True), 0.0)  # type: ignore[arg-type]
    store.room.park(session, attempt("large", False), 1.0)  # type: ignore[arg-type]
    store.room.park(session, attempt("small", True), 2.0)  # type: ignore[arg-type]
    store.close_session(gone)
    store.retry_for_room()
    assert served == ["first False"] and len(store.room) == 2
    store.expire(5.1)
    assert served == ["first False", "large True"]
    store.retry_for_room()
    assert served == ["first False", "large True", "small False"]


def test_prefetching_without_room_says_so(store: Store, cold: FakeCold, session: Session) -> None:
    fill_and_spill(store, cold, session, FITTING + 8)
    cold.finish_writes(store)
    on_disk = [key(n) for n in range(FITTING + 8) if key(n) not in store.catalog.by_key]
    for obj in list(store.catalog.by_key.values()):
        store.space.pin(obj, PinKind.HARD, 0.0)
    reply = store.reads.await_layers(session, Await(1, [on_disk[0], key(99)], 0, 0), 0.0)
    assert reply is not None and list(reply.statuses) == [Status.FULL, Status.MISSING]
    read_reply = store.reads.read(session, Read(1, on_disk[:1]), 0.0)
    assert read_reply is not None and list(read_reply.reply.statuses) == [Status.FULL]
