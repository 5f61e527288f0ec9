"""Memory for values whose size is not known before they arrive."""

import threading

import numpy as np

MAX_ARENA_BYTES = 32 << 20


class Arena:
    """Memory that values of unknown size are received into before they become bytes: kept, because touching
    fresh pages costs more than copying."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def take(self, size_bytes: int) -> memoryview:
        if size_bytes > MAX_ARENA_BYTES:
            return np.empty(size_bytes, np.uint8).data
        if size_bytes > self._memory.nbytes:
            self._memory = np.empty(size_bytes, np.uint8)
        return self._memory.data[:size_bytes]


class Arenas(threading.local):
    """`own` is that of the calling thread; whoever holds it may hand it to others."""

    def __init__(self) -> None:
        self.own = Arena()
