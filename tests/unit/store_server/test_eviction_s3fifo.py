from collections.abc import Callable

from hypothesis import given

from store_server.core.eviction.s3fifo import S3FifoPolicy
from tests.contracts.eviction_contract import Entry, EvictionContract, evict
from tests.unit.store_server.eviction_models import Step, follow, histories


class TestS3FifoContract(EvictionContract):
    policy_name = "s3fifo"


class NaiveS3Fifo:
    """The three queues as lists, oldest first, as the paper's algorithm 1 walks them."""

    def __init__(self) -> None:
        self.small: list[bytes] = []
        self.main: list[bytes] = []
        self.ghost: list[bytes] = []
        self.uses: dict[bytes, int] = {}
        self.size_bytes: dict[bytes, int] = {}

    def insert(self, key: bytes, parent: bytes | None, size_bytes: int) -> None:
        self.uses[key], self.size_bytes[key] = 0, size_bytes
        if key in self.ghost:
            self.ghost.remove(key)
            self.main.append(key)
        else:
            self.small.append(key)

    def access(self, key: bytes) -> None:
        self.uses[key] = min(self.uses[key] + 1, 3)

    def remove(self, key: bytes, evicted: bool) -> None:
        if key in self.small and evicted:
            self.ghost.append(key)
        for queue in (self.small, self.main):
            if key in queue:
                queue.remove(key)
        del self.uses[key]
        while evicted and len(self.ghost) > max(0.9 * len(self.uses), 1):
            self.ghost.pop(0)

    def victim(self, evictable: Callable[[bytes], bool]) -> bytes | None:
        small_bytes = sum(self.size_bytes[key] for key in self.small)
        total_bytes = small_bytes + sum(self.size_bytes[key] for key in self.main)
        if small_bytes >= 0.1 * total_bytes:
            return self.evict_small(evictable) or self.evict_main(evictable)
        return self.evict_main(evictable) or self.evict_small(evictable) or self.evict_main(evictable)

    def evict_small(self, evictable: Callable[[bytes], bool]) -> bytes | None:
        for key in list(self.small):
            if self.uses[key] > 1:
                self.small.remove(key)
                self.main.append(key)
                self.uses[key] = 0
            elif evictable(key):
                return key
        return None

    def evict_main(self, evictable: Callable[[bytes], bool]) -> bytes | None:
        """What must stay goes round untouched. When that is all there is, nothing has moved in the end."""
        while any(evictable(key) for key in self.main):
            key = self.main[0]
            if evictable(key):
                if self.uses[key] == 0:
                    return key
                self.uses[key] -= 1
            self.main.append(self.main.pop(0))
        return None


@given(histories)
def test_it_is_three_lists(history: list[Step]) -> None:
    follow(S3FifoPolicy(), NaiveS3Fifo(), history)


def test_one_hit_wonders_pass_through_the_small_queue_only() -> None:
    policy = S3FifoPolicy()
    for number in range(8):
        policy.on_insert(Entry(b"hot %d" % number))
    policy.on_access([b"hot %d" % number for number in range(8)] * 2)
    for number in range(100):
        policy.on_insert(Entry(b"scan %d" % number))
        assert evict(policy) == (b"scan %d" % number)


def test_an_object_whose_ghost_is_remembered_is_kept_longer() -> None:
    policy = S3FifoPolicy()
    for number in range(20):
        policy.on_insert(Entry(b"%d" % number))
    assert evict(policy) == b"0"
    policy.on_insert(Entry(b"0"))
    assert [evict(policy) for _ in range(17)] == [b"%d" % number for number in range(1, 18)]
    assert b"0" in policy


def test_what_was_removed_by_hand_leaves_no_ghost() -> None:
    policy = S3FifoPolicy()
    for number in range(20):
        policy.on_insert(Entry(b"%d" % number))
    policy.on_remove(b"0")
    policy.on_insert(Entry(b"0"))
    assert [evict(policy) for _ in range(20)][-1] == b"0"
