from collections.abc import Callable

import pytest
from hypothesis import given

from store_server.core.eviction import POLICIES
from store_server.core.eviction.lru import LruPolicy
from store_server.core.eviction.prefix_aware import PrefixAwarePolicy
from tests.contracts.eviction_contract import Entry, EvictionContract, anything, evict
from tests.unit.store_server.eviction_models import Step, follow, histories


class TestPrefixLruContract(EvictionContract):
    policy_name = "prefix_lru"


class TestPrefixLfuContract(EvictionContract):
    policy_name = "prefix_lfu"


class TestPrefixLengthAwareContract(EvictionContract):
    policy_name = "prefix_length_aware"


class TestPrefixSieveContract(EvictionContract):
    policy_name = "prefix_sieve"


class TestPrefixS3FifoContract(EvictionContract):
    policy_name = "prefix_s3fifo"


class NaivePrefixLru:
    def __init__(self) -> None:
        self.by_use: list[bytes] = []
        self.parent: dict[bytes, bytes | None] = {}
        self.orphans: list[bytes] = []

    def insert(self, key: bytes, parent: bytes | None, size_bytes: int) -> None:
        self.by_use.append(key)
        self.parent[key] = parent
        self.orphans = [orphan for orphan in self.orphans if self.parent[orphan] != key]

    def access(self, key: bytes) -> None:
        self.by_use.remove(key)
        self.by_use.append(key)

    def remove(self, key: bytes, evicted: bool) -> None:
        self.by_use.remove(key)
        del self.parent[key]
        self.orphans = [orphan for orphan in self.orphans if orphan != key]
        if evicted:
            children = [child for child, parent in self.parent.items() if parent == key]
            self.orphans += reversed(children)

    def victim(self, evictable: Callable[[bytes], bool]) -> bytes | None:
        leaves = [key for key in self.by_use if key not in self.parent.values()]
        return next((key for key in [*self.orphans, *leaves, *self.by_use] if evictable(key)), None)


@given(histories)
def test_it_is_the_inner_order_over_leaves(history: list[Step]) -> None:
    follow(PrefixAwarePolicy(LruPolicy()), NaivePrefixLru(), history, parents=True)


@pytest.mark.parametrize("name", [name for name in POLICIES if name.startswith("prefix_")])
def test_whatever_the_inner_order_a_block_outlives_its_children(name: str) -> None:
    policy = POLICIES[name]()
    for number in range(63):
        policy.on_insert(Entry(b"%d" % number), b"%d" % ((number - 1) // 2) if number else None)
    policy.on_access([b"%d" % number for number in range(62, 20, -1)])
    order = [evict(policy) for _ in range(63)]
    place = {key: index for index, key in enumerate(order)}
    assert all(place[b"%d" % number] < place[b"%d" % ((number - 1) // 2)] for number in range(1, 63))


def test_a_block_whose_parent_was_evicted_goes_next() -> None:
    policy = PrefixAwarePolicy(LruPolicy())
    policy.on_insert(Entry(b"old"))
    policy.on_insert(Entry(b"root"))
    policy.on_insert(Entry(b"leaf"), b"root")
    policy.on_access([b"leaf"])
    policy.on_remove(b"root", evicted=True)  # its slab was needed
    assert evict(policy) == b"leaf"


def test_an_orphan_is_an_ordinary_block_again_when_its_parent_comes_back() -> None:
    policy = PrefixAwarePolicy(LruPolicy())
    policy.on_insert(Entry(b"root"))
    policy.on_insert(Entry(b"other"))
    policy.on_insert(Entry(b"leaf"), b"root")
    policy.on_remove(b"root", evicted=True)
    policy.on_insert(Entry(b"root"))
    assert [evict(policy) for _ in range(3)] == [b"other", b"leaf", b"root"]


def test_children_of_a_pinned_block_are_no_orphans() -> None:
    """A pinned block leaves the policy without being evicted."""
    policy = PrefixAwarePolicy(LruPolicy())
    policy.on_insert(Entry(b"root"))
    policy.on_insert(Entry(b"old"))
    policy.on_insert(Entry(b"leaf"), b"root")
    policy.on_remove(b"root")
    assert [evict(policy) for _ in range(2)] == [b"old", b"leaf"]


def test_blocks_before_a_block_in_use_go_last() -> None:
    policy = PrefixAwarePolicy(LruPolicy())
    policy.on_insert(Entry(b"root"))
    policy.on_insert(Entry(b"leaf"), b"root")
    policy.on_insert(Entry(b"other"))
    victim = policy.victim(lambda entry: entry.key != b"leaf")
    assert victim is not None and victim.key == b"other"
    policy.on_remove(b"other", evicted=True)
    victim = policy.victim(lambda entry: entry.key != b"leaf")
    assert victim is not None and victim.key == b"root"


def test_blocks_that_claim_to_be_each_others_parent_can_be_evicted() -> None:
    policy = PrefixAwarePolicy(LruPolicy())
    policy.on_insert(Entry(b"a"), b"b")
    policy.on_insert(Entry(b"b"), b"a")
    policy.on_insert(Entry(b"self"), b"self")
    assert {evict(policy) for _ in range(3)} == {b"a", b"b", b"self"}
    assert policy.victim(anything) is None and not policy._links


@pytest.mark.parametrize("name", [name for name in POLICIES if name.startswith("prefix_")])
def test_begins_of_prefixes_do_not_make_every_search_long(name: str) -> None:
    """Readers that have the begin of a prefix themselves use its end only."""
    policy = POLICIES[name]()
    search, looked_at = policy._inner.victim, 0  # type: ignore[attr-defined]

    def counting_search(evictable: Callable[[Entry], bool]) -> object:
        def look(entry: Entry) -> bool:
            nonlocal looked_at
            looked_at += 1
            return evictable(entry)

        return search(look)

    policy._inner.victim = counting_search  # type: ignore[attr-defined]
    for number in range(4000):
        policy.on_insert(Entry(b"hot %d" % number), b"hot %d" % (number - 1) if number % 2000 else None)
    for number in range(2000):
        policy.on_insert(Entry(b"cold %d" % number))
        policy.on_access([b"hot 1999", b"hot 3999"] * 3)
        assert evict(policy) == b"cold %d" % number
    assert len(policy) == 4000 and all(b"hot %d" % number in policy for number in range(4000))
    # One full pass over the 4,000 for each eviction would be 8 million.
    assert looked_at < 2000 * 300
    # What was passed over has not been forgotten.
    assert [evict(policy) for _ in range(4000)][-1] in (b"hot 0", b"hot 2000")
    assert len(policy) == 0 and policy.victim(anything) is None


def test_when_all_ends_must_stay_parked_begins_can_go() -> None:
    policy = PrefixAwarePolicy(LruPolicy())
    for number in range(600):
        policy.on_insert(Entry(b"%d" % number), b"%d" % (number - 1) if number else None)
    assert policy._parked == {}
    for _ in range(3):
        victim = policy.victim(lambda entry: entry.key != b"599")
        assert victim is not None and victim.key != b"599"
        policy.on_remove(victim.key, evicted=True)
    assert policy._parked and len(policy) == 597


def test_bookkeeping_of_parents_ends_with_the_blocks() -> None:
    policy = PrefixAwarePolicy(LruPolicy())
    for number in range(50):
        policy.on_insert(Entry(b"%d" % number), b"%d" % (number // 2 - 1))
    for _ in range(50):
        evict(policy)
    assert not policy._links and not policy._orphans
