"""The store with a prefix-aware policy: what writers tell about parents decides what may go first."""

import pytest

from kvcore.errors import RequestRefused
from kvcore.wire.messages import Exists, Reserve, Status
from store_server.core.store import Store
from tests.unit.store_server.model import KIB, check_invariants, commit, key, new_store, read

BLOCK_BYTES = 16 * KIB


def save_chain(store: Store, numbers: list[int], parent: bytes = b"") -> None:
    """Reserved and sealed one by one, which tells an ordinary order nothing about prefixes."""
    session = store.open_session()
    for number in numbers:
        request = Reserve(1, [key(number)], [BLOCK_BYTES], 1, [parent])
        reply = store.writes.reserve(session, request, 0.0)
        assert reply is not None and reply.grants[0].status == Status.OK
        assert commit(store, session, [key(number)], 0, 1) == [Status.OK]
        parent = key(number)


def gone(store: Store, numbers: list[int]) -> list[int]:
    statuses = store.reads.exists(Exists(1, [key(number) for number in numbers])).statuses
    return [number for number, status in zip(numbers, statuses, strict=True) if status == Status.MISSING]


@pytest.mark.parametrize("policy", ["prefix_lru", "prefix_lfu", "prefix_sieve", "prefix_s3fifo"])
def test_a_prefix_loses_its_last_blocks_first(policy: str) -> None:
    store = new_store(1 << 20, slab_bytes=64 * KIB, eviction_policy=policy)
    save_chain(store, list(range(20)))
    store.space.evict_some(5, 1 << 20)
    assert gone(store, list(range(20))) == [15, 16, 17, 18, 19]
    check_invariants(store)


def test_without_the_parents_the_oldest_goes_first() -> None:
    store = new_store(1 << 20, slab_bytes=64 * KIB, eviction_policy="lru")
    save_chain(store, list(range(20)))
    store.space.evict_some(5, 1 << 20)
    assert gone(store, list(range(20))) == [0, 1, 2, 3, 4]


def test_the_begin_of_a_prefix_in_use_stays() -> None:
    store = new_store(1 << 20, slab_bytes=64 * KIB, eviction_policy="prefix_lru")
    save_chain(store, list(range(10)))
    save_chain(store, [100, 101], parent=key(4))
    read(store, store.open_session(), [key(101)])
    store.space.evict_some(6, 1 << 20)
    assert gone(store, [*range(10), 100, 101]) == [5, 6, 7, 8, 9, 101]


def test_one_parent_a_key_or_none() -> None:
    store = new_store()
    session = store.open_session()
    with pytest.raises(RequestRefused, match="1 parents for 2 keys"):
        store.writes.reserve(session, Reserve(1, [key(1), key(2)], [64], 1, [b""]), 0.0)
