"""Least recently used: the order of last use, and nothing else."""

from collections import OrderedDict
from collections.abc import Callable, Iterable

from store_server.core.eviction.base import Evictable


class LruPolicy:
    bytes_per_object = 165

    def __init__(self) -> None:
        # OrderedDict and not dict: reaching the front of a dict whose first entries were deleted is O(n).
        self._by_use: OrderedDict[bytes, Evictable] = OrderedDict()

    def on_insert(self, entry: Evictable, parent: bytes | None = None) -> None:
        self._by_use[entry.key] = entry

    def on_access(self, keys: Iterable[bytes]) -> None:
        move_to_end = self._by_use.move_to_end
        for key in keys:
            try:
                move_to_end(key)
            except KeyError:
                continue

    def on_remove(self, key: bytes, *, evicted: bool = False) -> None:
        self._by_use.pop(key, None)

    def victim(self, evictable: Callable[[Evictable], bool]) -> Evictable | None:
        for entry in self._by_use.values():
            if evictable(entry):
                return entry
        return None

    def __contains__(self, key: bytes) -> bool:
        return key in self._by_use

    def __len__(self) -> int:
        return len(self._by_use)
