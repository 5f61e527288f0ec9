"""From the addresses that SGLang's pools give to buffers the store's client reads and writes. Pure, but for
the memory it points at.
"""

import bisect
import ctypes
from collections.abc import Iterable, Sequence
from typing import Any


class LayoutError(Exception):
    """A pool gave addresses that make no sense; its pages are then misses."""


def tensor_bytes(tensor: Any) -> memoryview:
    """The memory of a contiguous tensor on the host, writable; the view keeps the tensor alive. Works for
    every dtype (numpy has no bfloat16) and without torch. LayoutError when the tensor lies elsewhere."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise LayoutError(f"pages must be contiguous and in host memory, not on {tensor.device}")
    size_bytes = int(tensor.numel()) * int(tensor.element_size())
    if size_bytes == 0:
        return memoryview(b"")
    memory = (ctypes.c_ubyte * size_bytes).from_address(int(tensor.data_ptr()))
    memory.owner = tensor  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")


class HostMemory:
    """The buffers of one pool. Runs are cut out of them, so an address outside can do no harm."""

    def __init__(self, tensors: Iterable[Any]) -> None:
        found = sorted((tensor for tensor in tensors if tensor.numel()), key=lambda each: each.data_ptr())
        self._begins = [int(tensor.data_ptr()) for tensor in found]
        self._views = [tensor_bytes(tensor) for tensor in found]

    def runs(self, addresses: Sequence[int], sizes_bytes: Sequence[int]) -> list[memoryview]:
        """One writable view a (address, size). LayoutError for one that is not wholly in one buffer."""
        begins, views = self._begins, self._views
        found: list[memoryview] = []
        for address, size_bytes in zip(addresses, sizes_bytes, strict=True):
            index = bisect.bisect_right(begins, address) - 1
            offset = address - begins[index] if index >= 0 else 0
            if index < 0 or offset + size_bytes > len(views[index]):
                raise LayoutError(f"{size_bytes} bytes at {address:#x} are in none of the pool's buffers")
            found.append(views[index][offset : offset + size_bytes])
        return found


def grouped(runs: Sequence[memoryview], num_objects: int) -> list[Sequence[memoryview]]:
    """Runs in order, the same number for each object."""
    if num_objects == 0 or len(runs) % num_objects:
        raise LayoutError(f"{len(runs)} runs cannot be shared out to {num_objects} objects")
    share = len(runs) // num_objects
    return [runs[first : first + share] for first in range(0, len(runs), share)]
