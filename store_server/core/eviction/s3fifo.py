"""S3-FIFO: a small queue that filters, a main queue, and a ghost queue that remembers (Yang et al., SOSP
'23).

New objects enter the small queue; those used more than once while there move on to the main queue, the others
are evicted and remembered as ghosts. An object that comes back while its ghost is remembered enters the main
queue. The main queue gives objects as many further rounds as they were used, at most three.

The small queue holds a tenth of the bytes. The policy does not know the capacity; at the moment of an
eviction it is what the policy holds. As in the paper there are as many ghosts as the main queue would hold
objects.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable

from store_server.core.eviction.base import Evictable

SMALL_SHARE = 0.1
MAX_USES = 3
_USES_TO_MOVE_ON = 2


class S3FifoPolicy:
    bytes_per_object = 310  # ghosts included

    def __init__(self) -> None:
        self._small: OrderedDict[bytes, Evictable] = OrderedDict()
        self._main: OrderedDict[bytes, Evictable] = OrderedDict()
        self._uses: dict[bytes, int] = {}
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._small_bytes = 0
        self._main_bytes = 0

    def on_insert(self, entry: Evictable, parent: bytes | None = None) -> None:
        self._uses[entry.key] = 0
        if entry.key in self._ghosts:
            del self._ghosts[entry.key]
            self._main[entry.key] = entry
            self._main_bytes += entry.size_bytes
        else:
            self._small[entry.key] = entry
            self._small_bytes += entry.size_bytes

    def on_access(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            uses = self._uses.get(key)
            if uses is not None and uses < MAX_USES:
                self._uses[key] = uses + 1

    def on_remove(self, key: bytes, *, evicted: bool = False) -> None:
        if self._uses.pop(key, None) is None:
            return
        entry = self._small.pop(key, None)
        if entry is None:
            self._main_bytes -= self._main.pop(key).size_bytes
            return
        self._small_bytes -= entry.size_bytes
        if evicted:
            self._ghosts[key] = None
            while len(self._ghosts) > max((1 - SMALL_SHARE) * len(self._uses), 1):
                self._ghosts.popitem(last=False)

    def victim(self, evictable: Callable[[Evictable], bool]) -> Evictable | None:
        if self._small_bytes >= SMALL_SHARE * (self._small_bytes + self._main_bytes):
            return self._victim_of_small(evictable) or self._victim_of_main(evictable)
        # The second look at the main queue is for what the small one has just moved there.
        return (
            self._victim_of_main(evictable)
            or self._victim_of_small(evictable)
            or self._victim_of_main(evictable)
        )

    def __contains__(self, key: bytes) -> bool:
        return key in self._uses

    def __len__(self) -> int:
        return len(self._uses)

    def _victim_of_small(self, evictable: Callable[[Evictable], bool]) -> Evictable | None:
        moving_on, found = [], None
        for key, entry in self._small.items():
            if self._uses[key] >= _USES_TO_MOVE_ON:
                moving_on.append(key)
            elif evictable(entry):
                found = entry
                break
        for key in moving_on:
            entry = self._small.pop(key)
            self._small_bytes -= entry.size_bytes
            self._main_bytes += entry.size_bytes
            self._main[key] = entry
            self._uses[key] = 0
        return found

    def _victim_of_main(self, evictable: Callable[[Evictable], bool]) -> Evictable | None:
        """What must stay now goes round like what was used, or every search would pass over it again."""
        fruitless = 0
        while fruitless < len(self._main):
            key, entry = next(iter(self._main.items()))
            if not evictable(entry):
                fruitless += 1
            elif self._uses[key] == 0:
                return entry
            else:
                self._uses[key] -= 1
                fruitless = 0
            self._main.move_to_end(key)
        return None
