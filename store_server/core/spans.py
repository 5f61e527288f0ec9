"""Byte ranges of layers inside the pool."""

from collections.abc import Iterable

from store_server.core.objects import StoredObject

Span = tuple[int, int]  # offset in the pool, size


def layer_spans(obj: StoredObject, layer_begin: int, layer_end: int) -> list[Span]:
    """Where layers [layer_begin, layer_end) of the object lie, in order."""
    layer_bytes = obj.size_bytes // obj.num_layers
    extents = obj.extents
    if len(extents) == 2:
        return [(extents[0] + layer_begin * layer_bytes, (layer_end - layer_begin) * layer_bytes)]
    skipped_bytes, wanted_bytes = layer_begin * layer_bytes, (layer_end - layer_begin) * layer_bytes
    spans: list[Span] = []
    for index in range(0, len(extents), 2):
        offset, size = extents[index], extents[index + 1]
        if skipped_bytes >= size:
            skipped_bytes -= size
            continue
        taken = min(size - skipped_bytes, wanted_bytes)
        spans.append((offset + skipped_bytes, taken))
        skipped_bytes = 0
        wanted_bytes -= taken
        if not wanted_bytes:
            break
    return spans


def merge_neighbours(spans: Iterable[Span]) -> list[Span]:
    """The same bytes in the same order with fewer pieces: a batch of small objects written together lies
    together, and is then sent or received as one."""
    merged: list[Span] = []
    begin = end = -1
    for offset, size in spans:
        if offset == end:
            end += size
        else:
            if end > begin:
                merged.append((begin, end - begin))
            begin, end = offset, offset + size
    if end > begin:
        merged.append((begin, end - begin))
    return merged
