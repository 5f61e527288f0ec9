"""SIEVE: one queue, one bit an object, one hand (Zhang et al., "SIEVE is simpler than LRU", NSDI '24).

New objects enter at the head. The hand walks from the tail to the head: it clears the bit of an object that
was used since the hand last passed, and stops at the first without a bit. Objects stay where they are in the
queue.
"""

from collections.abc import Callable, Iterable

from store_server.core.eviction.base import Evictable


class _Node:
    __slots__ = ("entry", "newer", "older", "visited")

    def __init__(self, entry: Evictable | None) -> None:
        self.entry = entry
        self.visited = False
        self.newer: _Node = self
        self.older: _Node = self


class SievePolicy:
    bytes_per_object = 165

    def __init__(self) -> None:
        self._nodes: dict[bytes, _Node] = {}
        # A ring through a sentinel: its `newer` is the tail (oldest), its `older` the head (newest).
        self._ends = _Node(None)
        self._hand = self._ends

    def on_insert(self, entry: Evictable, parent: bytes | None = None) -> None:
        node = self._nodes[entry.key] = _Node(entry)
        head = self._ends.older
        head.newer, node.older = node, head
        node.newer, self._ends.older = self._ends, node

    def on_access(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            node = self._nodes.get(key)
            if node is not None:
                node.visited = True

    def on_remove(self, key: bytes, *, evicted: bool = False) -> None:
        node = self._nodes.pop(key, None)
        if node is None:
            return
        if self._hand is node:
            self._hand = node.newer
        node.older.newer, node.newer.older = node.newer, node.older

    def victim(self, evictable: Callable[[Evictable], bool]) -> Evictable | None:
        # In two rounds every object is seen once without its bit, so what is not found then is not there.
        for _ in range(2 * (len(self._nodes) + 1)):
            node = self._hand
            if node.entry is not None and evictable(node.entry):
                if not node.visited:
                    return node.entry
                node.visited = False
            self._hand = node.newer
        return None

    def __contains__(self, key: bytes) -> bool:
        return key in self._nodes

    def __len__(self) -> int:
        return len(self._nodes)
