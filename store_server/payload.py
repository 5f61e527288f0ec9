"""Views of the pool for what arrives and what is sent, without a copy."""

import struct
from collections.abc import Iterable

from kvcore.transport.checksums import is_corrupt
from kvcore.wire.messages import Put, Write
from store_server.core.spans import Span, layer_spans
from store_server.core.writes import Incoming

_SKIP = -1  # offset of a span whose bytes nobody wants
_SCRATCH_BYTES = 256 << 10


class PayloadViews:
    """One for all connections: what is skipped goes to one scratch buffer that nobody reads."""

    def __init__(self, pool: memoryview) -> None:
        self._pool = pool
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))

    def of(self, spans: Iterable[Span]) -> list[memoryview]:
        pool = self._pool
        return [pool[offset : offset + size] for offset, size in spans]

    def targets(self, incoming: Incoming, sizes_bytes: list[int]) -> list[memoryview]:
        """Where the payload of a Put or Write goes; sizes_bytes[i] of it belong to keys[i]. Pieces that
        follow each other in the pool are one view, received at once."""
        begin_layer, end_layer = _layers(incoming)
        views: list[memoryview] = []
        begin, end = 0, 0
        for obj, size_bytes in zip(incoming.objects, sizes_bytes, strict=True):
            spans = [(_SKIP, size_bytes)] if obj is None else layer_spans(obj, begin_layer, end_layer)
            for offset, size in spans:
                if offset == end and end > begin:
                    end += size
                    continue
                if end > begin:
                    views.append(self._pool[begin:end])
                begin, end = (0, 0) if offset == _SKIP else (offset, offset + size)
                if offset == _SKIP:
                    views += self._skipped(size)
        if end > begin:
            views.append(self._pool[begin:end])
        return views

    def corrupt(self, incoming: Incoming) -> list[int]:
        """Indices of the keys whose received bytes do not match the checksums that came with them."""
        packed = incoming.checksums
        if not packed:
            return []
        checksums = struct.unpack(f"<{len(packed) // 8}Q", packed)
        begin_layer, end_layer = _layers(incoming)
        num_layers = end_layer - begin_layer
        return [
            index
            for index, obj in enumerate(incoming.objects)
            if obj is not None
            and is_corrupt(
                self.of(layer_spans(obj, begin_layer, end_layer)),
                checksums[num_layers * index : num_layers * (index + 1)],
            )
        ]

    def _skipped(self, size_bytes: int) -> list[memoryview]:
        whole, rest = divmod(size_bytes, _SCRATCH_BYTES)
        return [self._scratch] * whole + ([self._scratch[:rest]] if rest else [])


def _layers(incoming: Incoming) -> tuple[int, int]:
    request: Put | Write = incoming.request
    return (0, 1) if isinstance(request, Put) else (request.layer_begin, request.layer_end)
