"""Eviction, pins and watermarks; and that room is found whatever sizes came before."""

import pytest

from kvcore import metrics
from kvcore.errors import RequestRefused
from kvcore.wire.messages import ListKeys, Pin, PinKind, Status, Unpin
from store_server.core.store import Store
from tests.unit.store_server.model import (
    KIB,
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


def pin(store: Store, keys: list[bytes], kind: PinKind, ttl_ms: int = 1000, now: float = 0.0) -> list[Status]:
    return [Status(code) for code in store.upkeep.pin(Pin(1, keys, kind, ttl_ms), now).statuses]


def fill(store: Store, size_bytes: int, first: int = 0) -> list[bytes]:
    """Puts objects until the first eviction; returns the keys that are there."""
    session = store.open_session()
    evicted = store.counters[metrics.EVICTED_OBJECTS_TOTAL]
    number = first
    while store.counters[metrics.EVICTED_OBJECTS_TOTAL] == evicted:
        assert put(store, session, [key(number)], size_bytes) == [Status.OK]
        number += 1
    return [key(other) for other in range(first, number) if key(other) in store.catalog.by_key]


def test_a_full_pool_evicts_the_least_recently_used() -> None:
    store = new_store(1 << 20)
    session = store.open_session()
    keys = fill(store, 30 * KIB)
    assert keys[0] == key(1), "key 0 was the coldest"
    read(store, session, [keys[0]])
    put(store, session, [key(1000)], 30 * KIB)
    assert keys[0] in store.catalog.by_key and keys[1] not in store.catalog.by_key
    check_invariants(store)


def test_the_leaf_of_a_prefix_goes_before_its_root() -> None:
    store = new_store(1 << 20)
    session = store.open_session()
    prefix = [key(number) for number in range(8)]
    put(store, session, prefix, 30 * KIB)
    store.space.evict_some(1, free_bytes=1 << 20)
    assert key(7) not in store.catalog.by_key
    read(store, session, prefix[:7])
    store.space.evict_some(3, free_bytes=1 << 20)
    assert [number for number in range(8) if key(number) in store.catalog.by_key] == [0, 1, 2, 3]


@pytest.mark.parametrize("size", [300, 4 * KIB, 60 * KIB, 300 * KIB])
def test_room_is_found_after_any_other_size(size: int) -> None:
    store = new_store(2 << 20)
    session = store.open_session()
    for round_number, other in enumerate((1000, 4 * KIB, 20 * KIB, 100 * KIB, size)):
        for number in range(100):
            assert put(store, session, [key(1000 * round_number + number)], other) == [Status.OK]
        check_invariants(store)


def test_changing_the_size_evicts_neighbours_and_not_the_whole_pool() -> None:
    store = new_store(4 << 20, slab_bytes=64 * KIB)
    keys = fill(store, 4 * KIB)
    before = store.counters[metrics.EVICTED_OBJECTS_TOTAL]
    assert put(store, store.open_session(), [key(5000)], 64 * KIB) == [Status.OK]
    assert store.counters[metrics.EVICTED_OBJECTS_TOTAL] - before <= 16
    assert keys[-1] in store.catalog.by_key


@pytest.mark.parametrize("protection", ["lease", "hard pin", "soft pin"])
def test_a_slab_with_a_protected_object_is_passed_over(protection: str) -> None:
    store = new_store(512 * KIB, slab_bytes=64 * KIB)
    session = store.open_session()
    keys = fill(store, 16 * KIB)
    if protection == "lease":
        acquire(store, session, keys[:1])
    else:
        # By another than the coldest of the slab, which is picked before its neighbours are looked at.
        pin(store, keys[1:2], PinKind.HARD if protection == "hard pin" else PinKind.SOFT)
    assert put(store, session, [key(5000)], 64 * KIB) == [Status.OK]
    assert keys[0] in store.catalog.by_key or protection != "lease"
    assert keys[1] in store.catalog.by_key or protection == "lease"
    check_invariants(store)


def test_a_hard_pin_stays_also_when_its_soft_neighbours_have_to_go() -> None:
    store = new_store(512 * KIB, slab_bytes=64 * KIB)
    keys = fill(store, 16 * KIB)
    pin(store, keys, PinKind.SOFT)
    pin(store, keys[1::4], PinKind.HARD)
    assert put(store, store.open_session(), [key(5000)], 64 * KIB) in ([Status.OK], [Status.FULL])
    assert all(hard in store.catalog.by_key for hard in keys[1::4])


def test_leased_and_pending_objects_make_a_full_pool_full() -> None:
    store = new_store(512 * KIB)
    session = store.open_session()
    keys = fill(store, 30 * KIB)
    lease = acquire(store, session, keys)
    assert lease
    assert put(store, session, [key(5000)], 30 * KIB) == [Status.FULL]
    assert store.counters[metrics.RESERVE_FULL_TOTAL] == 1
    store.expire(1.0)
    assert put(store, session, [key(5000)], 30 * KIB) == [Status.OK]
    check_invariants(store)


def test_larger_than_the_pool_is_too_large_and_evicts_nothing() -> None:
    store = new_store(512 * KIB)
    session = store.open_session()
    keys = fill(store, 30 * KIB)
    evicted = store.counters[metrics.EVICTED_OBJECTS_TOTAL]
    assert put(store, session, [key(5000)], 513 * KIB) == [Status.TOO_LARGE]
    assert store.counters[metrics.EVICTED_OBJECTS_TOTAL] == evicted
    assert all(other in store.catalog.by_key for other in keys)


def test_the_bookkeeping_of_tiny_objects_counts() -> None:
    store = new_store(1 << 20)
    session = store.open_session()
    for number in range(5000):
        assert put(store, session, [key(number)], 1) == [Status.OK]
    assert store.space.committed_bytes <= store.space.capacity_bytes
    assert store.stats()[metrics.METADATA_BYTES] > store.stats()[metrics.POOL_USED_BYTES]
    check_invariants(store)


def test_watermarks_evict_in_slices_down_to_the_low_one() -> None:
    store = new_store(1 << 20, high_watermark=0.8, low_watermark=0.5)
    session = store.open_session()
    number = 0
    while not store.space.is_above_high_watermark:
        put(store, session, [key(number)], 8 * KIB)
        number += 1
    slices = 0
    while not store.space.evict_some(10)[2]:
        slices += 1
    assert slices >= 2
    assert 0.4 < store.space.committed_bytes / store.space.capacity_bytes <= 0.5
    check_invariants(store)


def test_hard_pins_are_never_evicted_and_soft_ones_last() -> None:
    store = new_store(1 << 20)
    session = store.open_session()
    put(store, session, [key(1), key(2), key(3)], 30 * KIB)
    assert pin(store, [key(1), key(9)], PinKind.HARD) == [Status.OK, Status.MISSING]
    assert pin(store, [key(2)], PinKind.SOFT) == [Status.OK]
    check_invariants(store)
    for number in range(10, 100):
        put(store, session, [key(number)], 30 * KIB)
    assert key(1) in store.catalog.by_key and key(2) in store.catalog.by_key
    assert key(3) not in store.catalog.by_key
    store.space.evict_some(1000, free_bytes=1 << 20)
    assert list(store.catalog.by_key) == [key(1)], "with nothing else left the soft pin gives way"
    assert remove(store, [key(1)]) == [Status.LEASED]
    assert list(store.upkeep.unpin(Unpin(1, [key(1)])).statuses) == [Status.OK]
    assert remove(store, [key(1)]) == [Status.OK]
    check_invariants(store)


def test_a_soft_pin_ends_by_time() -> None:
    store = new_store(1 << 20)
    session = store.open_session()
    put(store, session, [key(1)], 30 * KIB)
    pin(store, [key(1)], PinKind.SOFT, ttl_ms=5000, now=10.0)
    assert store.agenda.earliest <= 15.0
    store.expire(15.0)
    assert remove(store, [key(1)]) == [Status.OK]
    check_invariants(store)


def test_pinning_again_replaces_the_pin() -> None:
    store = new_store(1 << 20)
    session = store.open_session()
    reserve(store, session, [key(1)], 8 * KIB, num_layers=2)
    for kind in (PinKind.SOFT, PinKind.HARD, PinKind.SOFT, PinKind.HARD):
        pin(store, [key(1)], kind, ttl_ms=10)
        check_invariants(store)
    commit(store, session, [key(1)], 0, 2)
    store.expire(1.0)
    assert remove(store, [key(1)]) == [Status.LEASED]
    assert remove(store, [key(1)], force=True) == [Status.OK]
    check_invariants(store)


def test_an_unknown_kind_of_pin_is_refused() -> None:
    with pytest.raises(RequestRefused, match="no such kind"):
        new_store().upkeep.pin(Pin(1, [key(1)], 7), 0.0)


def test_a_listing_shows_every_object_once_although_others_come_and_go() -> None:
    store = new_store(8 << 20)
    session = store.open_session()
    put(store, session, [key(number) for number in range(100)], KIB)
    seen: list[bytes] = []
    cursor = 0
    while True:
        page = store.upkeep.list_keys(ListKeys(1, cursor, 7))
        seen += [info.key for info in page.keys]
        cursor = page.next_cursor
        if cursor == 0:
            break
        put(store, session, [key(1000 + len(seen))], KIB)
        remove(store, [key(99 - len(seen) // 7)])
    assert len(seen) == len(set(seen)) and set(seen) <= {key(number) for number in range(100)}
    assert {key(number) for number in range(80)} <= set(seen)


def test_a_listing_that_is_over_says_so() -> None:
    store = new_store(8 << 20)
    put(store, store.open_session(), [key(1), key(2)], KIB)
    cursor = store.upkeep.list_keys(ListKeys(1, 0, 1)).next_cursor
    for _ in range(8):
        store.upkeep.list_keys(ListKeys(1, 0, 1))
    with pytest.raises(RequestRefused, match="begin again"):
        store.upkeep.list_keys(ListKeys(1, cursor, 1))
    with pytest.raises(RequestRefused, match="at least 1"):
        store.upkeep.list_keys(ListKeys(1, 0, 0))
