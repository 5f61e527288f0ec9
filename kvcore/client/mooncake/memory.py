"""Memory by its address, which is how Mooncake's API names buffers."""

import ctypes
from collections.abc import Sequence

import numpy as np


def memory_at(address: int, size_bytes: int) -> memoryview:
    """The bytes there, writable. Whoever gave the address keeps the memory alive, and on the CPU."""
    return memoryview((ctypes.c_char * size_bytes).from_address(address)).cast("B")


def is_memory(address: int, size_bytes: int) -> bool:
    return address > 0 and size_bytes > 0


def are_even(*lists: Sequence[object]) -> bool:
    return len({len(one) for one in lists}) == 1


class BufferHandle(bytearray):
    """The value of an object, in memory of its own: bytes-like, with Mooncake's `ptr()` and `size()`."""

    def size(self) -> int:
        return len(self)

    def ptr(self) -> int:
        """Valid as long as the handle lives and is not resized."""
        return int(np.frombuffer(self, np.uint8).ctypes.data)
