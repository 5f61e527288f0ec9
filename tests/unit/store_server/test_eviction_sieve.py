from collections.abc import Callable

from hypothesis import given

from store_server.core.eviction.sieve import SievePolicy
from tests.contracts.eviction_contract import Entry, EvictionContract, evict
from tests.unit.store_server.eviction_models import Step, follow, histories


class TestSieveContract(EvictionContract):
    policy_name = "sieve"


class NaiveSieve:
    """A list, oldest first, and the index of the hand."""

    def __init__(self) -> None:
        self.queue: list[bytes] = []
        self.visited: set[bytes] = set()
        self.hand = 0

    def insert(self, key: bytes, parent: bytes | None, size_bytes: int) -> None:
        if self.hand == len(self.queue) and self.queue:
            self.hand = 0  # the hand had passed the newest and begins again at the oldest
        self.queue.append(key)

    def access(self, key: bytes) -> None:
        self.visited.add(key)

    def remove(self, key: bytes, evicted: bool) -> None:
        index = self.queue.index(key)
        del self.queue[index]
        self.visited.discard(key)
        if index < self.hand:
            self.hand -= 1

    def victim(self, evictable: Callable[[bytes], bool]) -> bytes | None:
        if not any(evictable(key) for key in self.queue):
            return None
        while True:
            if self.hand >= len(self.queue):
                self.hand = 0
            key = self.queue[self.hand]
            if evictable(key):
                if key not in self.visited:
                    return key
                self.visited.remove(key)
            self.hand += 1


@given(histories)
def test_it_is_a_list_with_a_hand(history: list[Step]) -> None:
    follow(SievePolicy(), NaiveSieve(), history)


def test_the_walk_of_the_paper() -> None:
    """Zhang et al., NSDI '24: objects used since the hand passed stay where they are and lose their bit."""
    policy = SievePolicy()
    for key in (b"a", b"b", b"c", b"d", b"e"):
        policy.on_insert(Entry(key))
    policy.on_access([b"a", b"b"])
    assert evict(policy) == b"c"
    policy.on_insert(Entry(b"f"))
    assert evict(policy) == b"d"  # the hand goes on; a and b are behind it although they have no bit now
    policy.on_insert(Entry(b"g"))
    policy.on_access([b"e", b"f", b"g"])
    assert evict(policy) == b"a"
