"""Host memory in which saved layers wait for the store: a bounded set of slots, each one layer of one block.

The engine's blocks are copied here in the order of the engine's own work and are free again after that;
nothing ever holds them.
"""

import heapq
import threading
from collections.abc import Callable, Sequence

from kvcore.errors import ConfigError
from kvcore.units import format_size
from mooncake_connector.kv_memory import HostRows, plain_rows


class Staging:
    """Thread-safe. `make_rows(num_rows, row_size_bytes)` says what memory it is made of."""

    def __init__(
        self,
        slot_size_bytes: int,
        size_bytes: int,
        make_rows: Callable[[int, int], HostRows] = plain_rows,
    ) -> None:
        self.num_slots = size_bytes // slot_size_bytes
        if self.num_slots == 0:
            raise ConfigError(
                f"staging_size_bytes of {format_size(size_bytes)} does not hold one layer of one block "
                f"({format_size(slot_size_bytes)}): make it larger"
            )
        self.rows = make_rows(self.num_slots, slot_size_bytes)
        self._free = list(range(self.num_slots))  # a heap
        self._lock = threading.Lock()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, num_slots: int) -> list[int]:
        """As many free slots as there are, at most `num_slots`; never waits."""
        with self._lock:
            # The lowest first: they lie together, so that a device copies many at once, and are used again
            # and again, so that little of the memory is ever touched.
            return [heapq.heappop(self._free) for _ in range(min(num_slots, len(self._free)))]

    def give(self, slots: Sequence[int]) -> None:
        with self._lock:
            for slot in slots:
                heapq.heappush(self._free, slot)
