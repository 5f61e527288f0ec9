"""Host memory in which saved layers wait for the store: a bounded set of slots, each one layer of one block.

The engine's blocks are copied here inside the step and are free again at once; nothing ever holds them.
"""

import threading

import numpy as np

from kvcore.errors import ConfigError
from kvcore.units import format_size
from mooncake_connector.kv_layout import ByteArray


class Staging:
    """Thread-safe. Memory is touched slot by slot, so an idle engine does not pay for all of it."""

    def __init__(self, slot_size_bytes: int, size_bytes: int) -> None:
        self.num_slots = size_bytes // slot_size_bytes
        if self.num_slots == 0:
            raise ConfigError(
                f"staging_size_bytes of {format_size(size_bytes)} does not hold one layer of one block "
                f"({format_size(slot_size_bytes)}): make it larger"
            )
        self._memory = np.empty((self.num_slots, slot_size_bytes), dtype=np.uint8)
        self._free = list(range(self.num_slots - 1, -1, -1))
        self._lock = threading.Lock()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, num_slots: int) -> list[int]:
        """As many free slots as there are, at most `num_slots`; never waits."""
        with self._lock:
            # Last given, first taken: its memory is still in the cache.
            return [self._free.pop() for _ in range(min(num_slots, len(self._free)))]

    def give(self, slots: list[int]) -> None:
        with self._lock:
            self._free.extend(slots)

    def row(self, slot: int) -> ByteArray:
        row: ByteArray = self._memory[slot]
        return row
