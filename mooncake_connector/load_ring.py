"""Host buffers of one size in which loads for a device land; they go round."""

import threading
from collections import deque

from mooncake_connector.kv_memory import REACHED, Done, HostRows


class LoadRing:
    """`num_buffers` runs of `buffer_rows` rows each, from `first_row` on. Thread-safe."""

    def __init__(self, rows: HostRows, first_row: int, num_buffers: int, buffer_rows: int) -> None:
        self.rows = rows
        self.buffer_rows = buffer_rows
        self._changed = threading.Condition()
        self._free: deque[tuple[int, Done]] = deque(
            (first_row + number * buffer_rows, REACHED) for number in range(num_buffers)
        )

    def take(self, timeout_ms: float) -> int | None:
        """The first row of a buffer that is free; None when none was given back in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._free, timeout_ms / 1e3):
                return None
            # The one that was given back first: its copies have most likely ended.
            first_row, copied = self._free.popleft()
        try:
            copied.wait()
        except BaseException:
            self.give(first_row, REACHED)
            raise
        return first_row

    def give(self, first_row: int, copied: Done) -> None:
        """The buffer may be written again once `copied` is reached."""
        with self._changed:
            self._free.append((first_row, copied))
            self._changed.notify()

    @property
    def num_free(self) -> int:
        return len(self._free)
