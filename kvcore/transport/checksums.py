"""xxh3-64 over the bytes of a layer, wherever they lie. 0 stands for "not given"."""

import os
import struct
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache

import xxhash

from kvcore.layout import split_views

PIECE_BYTES = 256 << 10
"""What is large is moved in pieces of this size and hashed in between, while it is in the core's cache."""

LARGE_READ_BYTES = 1 << 20
"""What is read and not larger is received in one go, then hashed. Pieces would save a tenth on an idle
machine and lose it on a busy one, where each may wait for a core and for Python's lock."""

LATE_SUMS_BYTES = 1 << 20
"""What is written and larger is hashed by a second thread; for less, handing it over costs more."""


def checksum(views: Sequence[memoryview]) -> int:
    """Of the concatenation of `views`."""
    if len(views) == 1:
        return xxhash.xxh3_64_intdigest(views[0])
    state = xxhash.xxh3_64()
    for view in views:
        state.update(view)
    return state.intdigest()


def layer_checksums(views: Sequence[memoryview], num_layers: int) -> list[int]:
    """One for each of `num_layers` equal layers that lie one behind the other in `views`."""
    if num_layers == 1:
        return [checksum(views)]
    return [checksum(run) for run in split_layers(views, num_layers)]


def split_layers(views: Sequence[memoryview], num_layers: int) -> list[list[memoryview]]:
    return split_views(views, [sum(map(len, views)) // num_layers] * num_layers)


def is_corrupt(views: Sequence[memoryview], expected: Sequence[int]) -> bool:
    """Whether one of the layers in `views` differs from what its writer computed."""
    if len(expected) == 1:
        return expected[0] != 0 and expected[0] != checksum(views)
    return any(expected) and differs(expected, layer_checksums(views, len(expected)))


def differs(expected: Sequence[int], found: Sequence[int]) -> bool:
    return any(given and given != computed for given, computed in zip(expected, found, strict=True))


class LateSums:
    """Checksums of values on their way out, one a value, computed by another thread while the bytes are being
    sent: sending is what one core is busy with, and the sums go last.

    The values are read between `begin` and `end`, and not after."""

    def __init__(self, values: Sequence[Sequence[memoryview]]) -> None:
        self.packed_bytes = 8 * len(values)
        self._values = values
        self._computing: Future[list[int]] | None = None

    def begin(self) -> None:
        """The first bytes are about to go."""
        self._computing = _hasher().submit(self._compute)

    def packed(self) -> bytes:
        """As u64 in little endian; waits for them."""
        assert self._computing is not None, "begin was not called"
        sums = self._computing.result()
        return struct.pack(f"<{len(sums)}Q", *sums)

    def end(self) -> None:
        """Whatever became of the sending: returns when nothing reads the values any more."""
        if self._computing is not None and not self._computing.cancel():
            self._computing.exception()

    def _compute(self) -> list[int]:
        return [checksum(views) for views in self._values]


@cache
def _hasher_of(pid: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="kv-checksums")


def _hasher() -> ThreadPoolExecutor:
    """One thread for all clients of this process; a child of fork gets its own."""
    return _hasher_of(os.getpid())


class RunningSums:
    """Checksums of layers that are on the move; `sums` are those of the ones that are through."""

    def __init__(self, layers: Sequence[Sequence[memoryview]]) -> None:
        self.sums: list[int] = []
        self._layers = iter(layers)
        self._state = xxhash.xxh3_64()
        self._views = self._next_layer()
        self._position = 0  # in the first of them

    def add(self, size_bytes: int) -> None:
        """The next `size_bytes` bytes of the layers are where they belong."""
        while size_bytes:
            view = self._views[0]
            piece = view[self._position : self._position + size_bytes]
            self._state.update(piece)
            size_bytes -= len(piece)
            self._position += len(piece)
            if self._position == len(view):
                del self._views[0]
                self._position = 0
                if not self._views:
                    self.sums.append(self._state.intdigest())
                    self._state.reset()
                    self._views = self._next_layer()

    def _next_layer(self) -> list[memoryview]:
        return [view for view in next(self._layers, ()) if len(view)]
