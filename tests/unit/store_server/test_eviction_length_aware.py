from collections.abc import Callable

from hypothesis import example, given

from store_server.core.eviction.length_aware import LengthAwarePolicy
from tests.contracts.eviction_contract import Entry, EvictionContract, evict
from tests.unit.store_server.eviction_models import Step, follow, histories


class TestLengthAwareContract(EvictionContract):
    policy_name = "length_aware"


class NaiveLengthAware:
    """Positions count along the parents that are there when the object is first looked at."""

    def __init__(self) -> None:
        self.parents: dict[bytes, bytes | None] = {}
        self.positions: dict[bytes, int] = {}
        self.uses: dict[bytes, int] = {}
        self.last_use: dict[bytes, int] = {}
        self.now = 0

    def insert(self, key: bytes, parent: bytes | None, size_bytes: int) -> None:
        self.parents[key] = parent
        self.uses[key] = 0
        self._use(key)

    def access(self, key: bytes) -> None:
        self._settle()
        self._use(key)

    def remove(self, key: bytes, evicted: bool) -> None:
        self._settle()
        for known in (self.parents, self.positions, self.uses, self.last_use):
            known.pop(key, None)

    def victim(self, evictable: Callable[[bytes], bool]) -> bytes | None:
        self._settle()
        candidates = [key for key in self.uses if evictable(key)]
        return min(
            candidates, key=lambda k: (self.uses[k], -self.positions[k], self.last_use[k]), default=None
        )

    def _use(self, key: bytes) -> None:
        self.now += 1
        self.uses[key] += 1
        self.last_use[key] = self.now

    def _settle(self) -> None:
        for key in self.uses:
            self.positions.setdefault(key, self._position(key))

    def _position(self, key: bytes) -> int:
        if key in self.positions:
            return self.positions[key]
        parent = self.parents[key]
        return 0 if parent is None or parent not in self.uses else 1 + self._position(parent)


@given(histories)
# An access to nobody settles nothing: the parent of 10 may still be coming.
@example([("insert", 1, 0), ("insert", 10, 0), ("access", 0, 0), ("insert", 5, 0), ("evict", 0, 0)])
def test_it_is_a_minimum_over_uses_and_positions(history: list[Step]) -> None:
    follow(LengthAwarePolicy(), NaiveLengthAware(), history, parents=True)


def chain(policy: LengthAwarePolicy, *keys: bytes) -> None:
    """As the store inserts a batch: last block first."""
    for key, parent in reversed(list(zip(keys, [None, *keys[:-1]], strict=True))):
        policy.on_insert(Entry(key), parent)


def test_of_unused_blocks_the_last_of_a_prefix_goes_first() -> None:
    policy = LengthAwarePolicy()
    chain(policy, b"a0", b"a1", b"a2")
    chain(policy, b"b0", b"b1")
    assert [evict(policy) for _ in range(5)] == [b"a2", b"a1", b"b1", b"a0", b"b0"]


def test_use_counts_more_than_position() -> None:
    policy = LengthAwarePolicy()
    chain(policy, b"a0", b"a1", b"a2")
    policy.on_access([b"a2"])
    assert [evict(policy) for _ in range(3)] == [b"a1", b"a0", b"a2"]


def test_positions_go_on_from_blocks_of_earlier_batches() -> None:
    policy = LengthAwarePolicy()
    chain(policy, b"a0", b"a1")
    policy.on_insert(Entry(b"a3"), b"a2")
    policy.on_insert(Entry(b"a2"), b"a1")
    chain(policy, b"b0", b"b1", b"b2")
    assert [evict(policy) for _ in range(3)] == [b"a3", b"a2", b"b2"]


def test_parents_that_form_a_circle_do_no_harm() -> None:
    policy = LengthAwarePolicy()
    policy.on_insert(Entry(b"a"), b"b")
    policy.on_insert(Entry(b"b"), b"a")
    policy.on_insert(Entry(b"self"), b"self")
    assert {evict(policy) for _ in range(3)} == {b"a", b"b", b"self"}


def test_the_heap_stays_in_proportion_to_the_objects() -> None:
    policy = LengthAwarePolicy()
    for number in range(100):
        policy.on_insert(Entry(b"%d" % number))
    for _ in range(500):
        policy.on_access([b"%d" % number for number in range(100)])
    assert len(policy._heap) <= 2000
    assert evict(policy) == b"0"
