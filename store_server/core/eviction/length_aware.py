"""LengthAware: like LFU, but of equally often used blocks the one furthest from the begin of its prefix goes
first.

The LengthAwareCache of the Mooncake paper (FAST '25, table of cache policies): later blocks of a request are
shared by fewer requests. How far a block is from the begin is counted along the parents that writers told; an
object without a known parent counts as a first block. Ties go to the one used longest ago. Costs O(log n).
"""

import heapq
from collections.abc import Callable, Iterable

from store_server.core.eviction.base import Evictable

_REBUILD_FACTOR = 4
_REBUILD_MIN = 1024

_HeapItem = tuple[int, int, int, bytes]  # uses, minus position, tick, key


class _Node:
    __slots__ = ("entry", "parent", "position", "tick", "uses")

    def __init__(self, entry: Evictable, parent: bytes | None, tick: int) -> None:
        self.entry = entry
        self.parent = parent
        self.position = -1  # not settled yet
        self.uses = 1
        self.tick = tick


class LengthAwarePolicy:
    bytes_per_object = 560  # the heap holds each object several times

    def __init__(self) -> None:
        self._nodes: dict[bytes, _Node] = {}
        self._heap: list[_HeapItem] = []
        self._unsettled: list[_Node] = []
        self._tick = 0

    def on_insert(self, entry: Evictable, parent: bytes | None = None) -> None:
        self._tick += 1
        node = self._nodes[entry.key] = _Node(entry, parent, self._tick)
        # The blocks of a batch come last one first, so the parent that tells the position may still be
        # coming.
        self._unsettled.append(node)

    def on_access(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            node = self._nodes.get(key)
            if node is not None:
                if self._unsettled:
                    self._settle()
                self._tick += 1
                node.uses += 1
                node.tick = self._tick
                self._push(node)

    def on_remove(self, key: bytes, *, evicted: bool = False) -> None:
        self._settle()
        self._nodes.pop(key, None)

    def victim(self, evictable: Callable[[Evictable], bool]) -> Evictable | None:
        self._settle()
        passed_over: list[_HeapItem] = []
        found = None
        while self._heap and found is None:
            item = self._heap[0]
            node = self._nodes.get(item[3])
            if node is None or node.tick != item[2]:
                heapq.heappop(self._heap)  # outdated: used again, or gone
            elif evictable(node.entry):
                found = node.entry
            else:
                passed_over.append(heapq.heappop(self._heap))
        for item in passed_over:
            heapq.heappush(self._heap, item)
        return found

    def __contains__(self, key: bytes) -> bool:
        return key in self._nodes

    def __len__(self) -> int:
        return len(self._nodes)

    def _settle(self) -> None:
        """Give positions to what was inserted since the last time."""
        for node in self._unsettled:
            chain = []
            at: _Node | None = node
            while at is not None and at.position < 0:
                chain.append(at)
                at.position = 0  # also ends a chain that bites its own tail
                at = self._nodes.get(at.parent) if at.parent is not None else None
            position = at.position + 1 if at is not None and at not in chain else 0
            for link in reversed(chain):
                link.position = position
                position += 1
        for node in self._unsettled:
            self._push(node)
        self._unsettled.clear()

    def _push(self, node: _Node) -> None:
        heapq.heappush(self._heap, self._item(node))
        if len(self._heap) > max(_REBUILD_MIN, _REBUILD_FACTOR * len(self._nodes)):
            self._heap = [self._item(node) for node in self._nodes.values()]
            heapq.heapify(self._heap)

    @staticmethod
    def _item(node: _Node) -> _HeapItem:
        return node.uses, -node.position, node.tick, node.entry.key
