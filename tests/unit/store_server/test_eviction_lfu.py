from collections.abc import Callable

from hypothesis import given

from store_server.core.eviction.lfu import LfuPolicy
from tests.contracts.eviction_contract import Entry, EvictionContract, evict
from tests.unit.store_server.eviction_models import Step, follow, histories


class TestLfuContract(EvictionContract):
    policy_name = "lfu"


class NaiveLfu:
    def __init__(self) -> None:
        self.uses: dict[bytes, int] = {}
        self.last_use: dict[bytes, int] = {}
        self.now = 0

    def insert(self, key: bytes, parent: bytes | None, size_bytes: int) -> None:
        self.uses[key] = 0
        self.access(key)

    def access(self, key: bytes) -> None:
        self.now += 1
        self.uses[key] += 1
        self.last_use[key] = self.now

    def remove(self, key: bytes, evicted: bool) -> None:
        del self.uses[key]

    def victim(self, evictable: Callable[[bytes], bool]) -> bytes | None:
        candidates = [key for key in self.uses if evictable(key)]
        return min(candidates, key=lambda key: (self.uses[key], self.last_use[key]), default=None)


@given(histories)
def test_it_is_a_minimum_over_use_counts(history: list[Step]) -> None:
    follow(LfuPolicy(), NaiveLfu(), history)


def test_the_least_used_goes_first_and_of_equals_the_longest_unused() -> None:
    policy = LfuPolicy()
    for key in (b"a", b"b", b"c", b"d"):
        policy.on_insert(Entry(key))
    policy.on_access([b"a", b"a", b"c", b"b"])
    assert [evict(policy) for _ in range(4)] == [b"d", b"c", b"b", b"a"]


def test_use_counts_are_forgotten_with_the_object() -> None:
    policy = LfuPolicy()
    policy.on_insert(Entry(b"a"))
    policy.on_access([b"a"] * 10)
    assert evict(policy) == b"a"
    policy.on_insert(Entry(b"a"))
    policy.on_insert(Entry(b"b"))
    policy.on_access([b"b"])
    assert evict(policy) == b"a"
