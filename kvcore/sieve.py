"""SIEVE: one queue, one bit an entry, one hand (Zhang et al., "SIEVE is simpler than LRU", NSDI '24).

New entries enter at the head. The hand walks from the tail to the head: it clears the bit of an entry that
was used since the hand last passed, and stops at the first without a bit. Entries stay where they are in the
queue.
"""

from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class _Node(Generic[V]):
    __slots__ = ("newer", "older", "value", "visited")

    def __init__(self, value: V | None) -> None:
        self.value = value
        self.visited = False
        self.newer: _Node[V] = self
        self.older: _Node[V] = self


class Sieve(Generic[K, V]):
    """Values by key, in an order of eviction. Not thread-safe."""

    def __init__(self) -> None:
        self._nodes: dict[K, _Node[V]] = {}
        # A ring through a sentinel: its `newer` is the tail (oldest), its `older` the head (newest).
        self._ends: _Node[V] = _Node(None)
        self._hand = self._ends

    def insert(self, key: K, value: V) -> None:
        """`key` must not be there yet."""
        node = self._nodes[key] = _Node(value)
        head = self._ends.older
        head.newer, node.older = node, head
        node.newer, self._ends.older = self._ends, node

    def get(self, key: K) -> V | None:
        """The value, which does not count as used; None when it is not there."""
        node = self._nodes.get(key)
        return None if node is None else node.value

    def touch(self, key: K) -> V | None:
        """The value, which counts as used; None when it is not there."""
        node = self._nodes.get(key)
        if node is None:
            return None
        node.visited = True
        return node.value

    def remove(self, key: K) -> V | None:
        """The value that was there, or None."""
        node = self._nodes.pop(key, None)
        if node is None:
            return None
        if self._hand is node:
            self._hand = node.newer
        node.older.newer, node.newer.older = node.newer, node.older
        return node.value

    def victim(self, evictable: Callable[[V], bool]) -> V | None:
        """The next to evict of those for which `evictable` answers True. It stays until it is removed."""
        # In two rounds every entry is seen once without its bit, so what is not found then is not there.
        for _ in range(2 * (len(self._nodes) + 1)):
            node = self._hand
            if node.value is not None and evictable(node.value):
                if not node.visited:
                    return node.value
                node.visited = False
            self._hand = node.newer
        return None

    def values(self) -> Iterator[V]:
        """From the oldest to the newest."""
        node = self._ends.newer
        while node.value is not None:
            yield node.value
            node = node.newer

    def __contains__(self, key: K) -> bool:
        return key in self._nodes

    def __len__(self) -> int:
        return len(self._nodes)
