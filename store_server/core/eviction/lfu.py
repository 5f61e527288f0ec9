"""Least frequently used: the object with the fewest uses goes; of those, the one whose last use is longest
ago.

Frequency lists as in Shah, Mitra and Matani, "An O(1) algorithm for implementing the LFU cache eviction
scheme" (2010). An object that was evicted begins again at one use.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable

from store_server.core.eviction.base import Evictable


class LfuPolicy:
    bytes_per_object = 195

    def __init__(self) -> None:
        self._uses: dict[bytes, int] = {}
        self._by_uses: dict[int, OrderedDict[bytes, Evictable]] = {}
        # Sorted use counts that have objects; counts grow by one, so a new count goes right behind its
        # predecessor.
        self._next_count: dict[int, int] = {0: 0}
        self._previous_count: dict[int, int] = {0: 0}

    def on_insert(self, entry: Evictable, parent: bytes | None = None) -> None:
        self._uses[entry.key] = 1
        self._list_after(0, 1)[entry.key] = entry

    def on_access(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            count = self._uses.get(key)
            if count is None:
                continue
            entry = self._by_uses[count].pop(key)
            self._uses[key] = count + 1
            self._list_after(count, count + 1)[key] = entry
            self._drop_if_empty(count)

    def on_remove(self, key: bytes, *, evicted: bool = False) -> None:
        count = self._uses.pop(key, None)
        if count is not None:
            del self._by_uses[count][key]
            self._drop_if_empty(count)

    def victim(self, evictable: Callable[[Evictable], bool]) -> Evictable | None:
        count = self._next_count[0]
        while count:
            for entry in self._by_uses[count].values():
                if evictable(entry):
                    return entry
            count = self._next_count[count]
        return None

    def __contains__(self, key: bytes) -> bool:
        return key in self._uses

    def __len__(self) -> int:
        return len(self._uses)

    def _list_after(self, previous: int, count: int) -> "OrderedDict[bytes, Evictable]":
        entries = self._by_uses.get(count)
        if entries is None:
            entries = self._by_uses[count] = OrderedDict()
            following = self._next_count[previous]
            self._next_count[previous], self._previous_count[count] = count, previous
            self._next_count[count], self._previous_count[following] = following, count
        return entries

    def _drop_if_empty(self, count: int) -> None:
        if not self._by_uses[count]:
            del self._by_uses[count]
            previous, following = self._previous_count.pop(count), self._next_count.pop(count)
            self._next_count[previous], self._previous_count[following] = following, previous
