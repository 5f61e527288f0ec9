"""A cold tier that may not delay writers: eviction in the background spills to it, puts never wait for it."""

import pytest

from kvcore.wire.messages import Status
from store_server.core.objects import Session
from store_server.core.owners import Quota
from store_server.core.store import Store, StoreLimits
from tests.unit.store_server.fake_cold import FakeCold, new_tiered_store
from tests.unit.store_server.model import KIB, check_invariants, key, put

OBJECT_BYTES = 32 * KIB
FITTING = 31


@pytest.fixture
def cold() -> FakeCold:
    cold = FakeCold()
    cold.delays_writers = False
    return cold


def fill(store: Store, session: Session, first: int, count: int) -> list[Status]:
    return [put(store, session, [key(number)], OBJECT_BYTES)[0] for number in range(first, first + count)]


def test_a_put_takes_the_room_it_needs_at_once(cold: FakeCold) -> None:
    store = new_tiered_store(cold)
    session = store.open_session()
    assert fill(store, session, 0, 3 * FITTING) == [Status.OK] * (3 * FITTING)
    assert not cold.writing and not store.space.is_making_room
    check_invariants(store)


def test_the_background_spills_and_a_put_takes_what_is_saved_first(cold: FakeCold) -> None:
    store = new_tiered_store(cold, high_watermark=0.9, low_watermark=0.5)
    session = store.open_session()
    fill(store, session, 0, FITTING)
    assert store.space.is_above_high_watermark
    store.space.evict_some(1000)
    assert len(cold.writing) >= FITTING // 3
    assert fill(store, session, 50, 1) == [Status.OK]  # without one of those that are being written
    num_spilled = len(cold.writing)
    cold.finish_writes(store)
    assert len(cold.stored) == num_spilled
    assert fill(store, session, 60, num_spilled) == [Status.OK] * num_spilled
    lost = [n for n in range(FITTING) if not cold.find(key(n)) and key(n) not in store.catalog.by_key]
    assert len(lost) == 1  # the one that made room for number 50
    check_invariants(store)


def test_a_quota_is_kept_without_waiting(cold: FakeCold) -> None:
    owner = bytes(16)
    quota = Quota(prefix=owner, dram_bytes=10 * OBJECT_BYTES, ssd_bytes=0)
    store = Store(StoreLimits(pool_size_bytes=1 << 20, slab_bytes=64 << 10), cold, quotas=[quota])
    session = store.open_session()
    keys = [owner + key(number) for number in range(30)]
    assert [put(store, session, [name], OBJECT_BYTES)[0] for name in keys] == [Status.OK] * 30
    assert not cold.writing
    assert store.owners is not None and store.owners.used_bytes(owner) <= 10 * OBJECT_BYTES
