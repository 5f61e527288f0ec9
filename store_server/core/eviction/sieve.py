"""SIEVE (kvcore/sieve.py) as an order of objects."""

from collections.abc import Callable, Iterable

from kvcore.sieve import Sieve
from store_server.core.eviction.base import Evictable


class SievePolicy:
    bytes_per_object = 165

    def __init__(self) -> None:
        self._queue: Sieve[bytes, Evictable] = Sieve()

    def on_insert(self, entry: Evictable, parent: bytes | None = None) -> None:
        self._queue.insert(entry.key, entry)

    def on_access(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._queue.touch(key)

    def on_remove(self, key: bytes, *, evicted: bool = False) -> None:
        self._queue.remove(key)

    def victim(self, evictable: Callable[[Evictable], bool]) -> Evictable | None:
        return self._queue.victim(evictable)

    def __contains__(self, key: bytes) -> bool:
        return key in self._queue

    def __len__(self) -> int:
        return len(self._queue)
