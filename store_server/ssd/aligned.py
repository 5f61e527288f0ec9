"""Memory that O_DIRECT accepts: page-aligned address and length."""

import mmap
from collections.abc import Sequence

import numpy as np
import xxhash

from store_server.ssd.format import PAGE_BYTES, layer_bounds, round_up


def address_of(view: memoryview) -> int:
    return int(np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0]) if len(view) else 0


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Like `target[:] = source`, but numpy lets other threads run meanwhile: the store's loop must not stand
    still."""
    if len(source):
        np.copyto(np.frombuffer(target, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))


def is_direct(buffers: Sequence[memoryview]) -> bool:
    """Can O_DIRECT use these in place? All begin on a page and all but the last end on one."""
    return all(address_of(view) % PAGE_BYTES == 0 for view in buffers) and all(
        len(view) % PAGE_BYTES == 0 for view in buffers[:-1]
    )


class AlignedBuffer:
    """Anonymous page-aligned memory, handed out in pages from front to back until `reset`."""

    def __init__(self, size_bytes: int) -> None:
        self._memory = mmap.mmap(-1, round_up(max(size_bytes, PAGE_BYTES)))
        self._view = memoryview(self._memory)
        self._used_bytes = 0

    @property
    def free_bytes(self) -> int:
        return len(self._view) - self._used_bytes

    def take(self, size_bytes: int) -> memoryview:
        """`size_bytes` rounded up to whole pages. The content is what was there before."""
        begin, self._used_bytes = self._used_bytes, self._used_bytes + round_up(size_bytes)
        return self._view[begin : self._used_bytes]

    def reset(self) -> None:
        self._used_bytes = 0


class Arena:
    """Aligned scratch memory of one thread. Keeps `keep_bytes`; more is allocated for one use and let go."""

    def __init__(self, keep_bytes: int) -> None:
        self._kept = AlignedBuffer(keep_bytes)

    def take(self, size_bytes: int) -> memoryview:
        if round_up(size_bytes) <= self._kept.free_bytes:
            return self._kept.take(size_bytes)
        return AlignedBuffer(size_bytes).take(size_bytes)

    def reset(self) -> None:
        """Everything taken so far may be handed out again."""
        self._kept.reset()


def split_views(buffers: Sequence[memoryview], begin: int, end: int) -> list[memoryview]:
    """The pieces of [begin, end) of the concatenation of `buffers`."""
    pieces, at = [], 0
    for view in buffers:
        low, high = max(begin - at, 0), min(end - at, len(view))
        if low < high:
            pieces.append(view[low:high])
        at += len(view)
    return pieces


def layer_checksums(buffers: Sequence[memoryview], size_bytes: int, num_layers: int) -> list[int]:
    """xxh3-64 of each layer of the object lying in `buffers`."""
    digests = []
    for layer in range(num_layers):
        pieces = split_views(buffers, *layer_bounds(size_bytes, num_layers, layer))
        if len(pieces) == 1:
            digests.append(xxhash.xxh3_64_intdigest(pieces[0]))
        else:
            hasher = xxhash.xxh3_64()
            for piece in pieces:
                hasher.update(piece)
            digests.append(hasher.intdigest())
    return digests
