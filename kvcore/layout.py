"""Geometry of KV bytes: how large layers and objects are, and how runs of bytes lie over several buffers.

An engine keeps each layer in its own tensor, the store keeps a block's layers one behind the other, and the
store's pool may keep that run in several extents. These pure functions translate between the three.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec


class KVGeometry(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of one rank's KV cache group. `kv_parts` is 2 (keys and values), 1 for MLA's joint latent."""

    block_size_tokens: int
    num_layers: int
    num_kv_heads: int
    head_size: int
    dtype_size_bytes: int
    kv_parts: int = 2

    @property
    def layer_size_bytes(self) -> int:
        """Bytes of one (layer, block)."""
        token_bytes = self.kv_parts * self.num_kv_heads * self.head_size * self.dtype_size_bytes
        return token_bytes * self.block_size_tokens

    @property
    def object_size_bytes(self) -> int:
        """Bytes of one block over all layers: the size to reserve for it."""
        return self.layer_size_bytes * self.num_layers


def layer_span(size_bytes: int, num_layers: int, layer_begin: int, layer_end: int) -> tuple[int, int]:
    """Byte range [begin, end) of layers [layer_begin, layer_end) inside an object."""
    return layer_begin * size_bytes // num_layers, layer_end * size_bytes // num_layers


def layer_sizes_bytes(size_bytes: int, num_layers: int, layer_begin: int, layer_end: int) -> list[int]:
    """Size of each of the layers; they differ by one byte where `size_bytes` does not divide evenly."""
    edges = [layer * size_bytes // num_layers for layer in range(layer_begin, layer_end + 1)]
    return [end - begin for begin, end in itertools.pairwise(edges)]


def as_views(buffer: Any) -> list[memoryview]:
    """A buffer, or a list or tuple of them, as flat byte views of the same memory.

    Raises TypeError for what has no buffer protocol or is not contiguous.
    """
    if type(buffer) is memoryview and buffer.ndim == 1 and buffer.itemsize == 1 and buffer.contiguous:
        return [buffer]
    if isinstance(buffer, (list, tuple)):
        return [view for part in buffer for view in as_views(part)]
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise TypeError("a buffer must be contiguous in C order; copy it, or pass its rows one by one")
    # cast() refuses shapes with a zero in them.
    return [view.cast("B")] if view.nbytes else [memoryview(b"")]


def total_bytes(views: Iterable[memoryview]) -> int:
    return sum(map(len, views))


def first_bytes(views: Sequence[memoryview], size_bytes: int) -> list[memoryview]:
    """The first `size_bytes` of what lies in `views`, or all if there are fewer."""
    found: list[memoryview] = []
    for view in views:
        found.append(view[:size_bytes])
        size_bytes -= len(found[-1])
        if not size_bytes:
            break
    return found


def split_views(views: Sequence[memoryview], sizes_bytes: Iterable[int]) -> list[list[memoryview]]:
    """Cuts the concatenation of `views` into runs of the given sizes, without copying.

    The sizes must not add up to more than there is (ValueError); what is left over is ignored.
    """
    runs: list[list[memoryview]] = []
    index, used = 0, 0
    for size in sizes_bytes:
        run: list[memoryview] = []
        while size > 0:
            if index == len(views):
                raise ValueError("the buffers are shorter than the sizes they are split into")
            piece = views[index][used : used + size] if used or len(views[index]) > size else views[index]
            size -= len(piece)
            used += len(piece)
            if used == len(views[index]):
                index, used = index + 1, 0
            if len(piece):
                run.append(piece)
        runs.append(run)
    return runs


def extent_spans(extents: Sequence[int], begin: int, end: int) -> list[tuple[int, int]]:
    """(pool offset, size) of the object bytes [begin, end), in order; `extents` as in a Grant.

    ValueError when the extents hold less than that.
    """
    spans: list[tuple[int, int]] = []
    position = 0
    for index in range(0, len(extents), 2):
        offset, size = extents[index], extents[index + 1]
        low, high = max(begin, position), min(end, position + size)
        if low < high:
            spans.append((offset + low - position, high - low))
        position += size
    if position < end:
        raise ValueError(f"extents of {position} bytes do not reach byte {end}")
    return spans


def granted_spans(
    extents: Sequence[int],
    size_bytes: int,
    num_layers: int,
    layer_begin: int,
    layer_end: int,
    pool_size_bytes: int,
) -> tuple[int, list[tuple[int, int]] | None] | None:
    """Of layers [layer_begin, layer_end) of a Grant, whose fields a store may have wrong: their bytes, and
    the spans of the pool as `spans_within`. None when it has no such layers."""
    if num_layers < 1 or not 0 <= layer_begin < layer_end <= num_layers:
        return None
    begin, end = layer_span(size_bytes, num_layers, layer_begin, layer_end)
    return None if begin >= end else (end - begin, spans_within(extents, begin, end, pool_size_bytes))


def spans_within(
    extents: Sequence[int], begin: int, end: int, pool_size_bytes: int
) -> list[tuple[int, int]] | None:
    """As `extent_spans`; None when the extents do not hold these bytes or reach out of the pool."""
    try:
        spans = extent_spans(extents, begin, end)
    except (ValueError, IndexError):
        return None
    if any(offset < 0 or offset + size > pool_size_bytes for offset, size in spans):
        return None
    return spans
