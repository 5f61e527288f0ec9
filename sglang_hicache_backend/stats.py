"""What SGLang's metrics want to know: pages and GB/s of each transfer since it asked last. It asks at every
turn of its scheduler's loop, so that asking costs next to nothing.
"""

import threading
from typing import NamedTuple

# Of one kind between two questions; more say no more, and a metrics loop that has died must not cost memory.
MAX_SAMPLES = 4096


class Transfers(NamedTuple):
    """Lists of equal length: pages of a transfer, and its speed in GiB/s."""

    pages: list[int]
    gib_per_s: list[float]


class TransferStats:
    """Thread-safe. Counts nothing while `is_on` is False: nobody would take it away."""

    def __init__(self, is_on: bool) -> None:
        self.is_on = is_on
        self._lock = threading.Lock()
        self._loads = Transfers([], [])
        self._saves = Transfers([], [])
        self._is_empty = True

    def loaded(self, num_pages: int, size_bytes: int, seconds: float) -> None:
        with self._lock:
            self._add(self._loads, num_pages, size_bytes, seconds)

    def saved(self, num_pages: int, size_bytes: int, seconds: float) -> None:
        with self._lock:
            self._add(self._saves, num_pages, size_bytes, seconds)

    def take(self) -> tuple[Transfers, Transfers] | None:
        """Loads and saves since the last call; None when there were none."""
        if self._is_empty:
            return None
        with self._lock:
            taken = (self._loads, self._saves)
            self._loads, self._saves = Transfers([], []), Transfers([], [])
            self._is_empty = True
        return taken

    def _add(self, into: Transfers, num_pages: int, size_bytes: int, seconds: float) -> None:
        if self.is_on and num_pages and len(into.pages) < MAX_SAMPLES:
            into.pages.append(num_pages)
            into.gib_per_s.append(size_bytes / max(seconds, 1e-9) / (1 << 30))
            self._is_empty = False
