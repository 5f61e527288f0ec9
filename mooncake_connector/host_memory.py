"""A KV cache in host memory: loads land in the engine's blocks without a copy, saves are copied at once."""

from collections.abc import Mapping, Sequence

import numpy as np

from kvcore.errors import ConfigError
from mooncake_connector.kv_layout import ByteArray, KVLayout, array_span
from mooncake_connector.kv_memory import REACHED, Done, HostRows, plain_rows


class HostMemory:
    """`layers`: layer name -> uint8 view of its memory, which is neither copied here nor owned."""

    def __init__(self, layers: Mapping[str, ByteArray], num_blocks: int) -> None:
        spans = {name: array_span(name, array) for name, array in layers.items()}
        self.layout = KVLayout(spans, num_blocks)
        self._blocks: list[ByteArray] = []
        for layer, name in enumerate(self.layout.layer_names):
            span = self.layout.blocks(layer)
            self._blocks.append(np.lib.stride_tricks.as_strided(layers[name], span.shape, span.strides))

    def make_rows(self, num_rows: int, row_size_bytes: int) -> HostRows:
        return plain_rows(num_rows, row_size_bytes)

    def arrivals(self) -> list[memoryview]:
        whole = []
        for blocks in self._blocks:
            size_bytes = 1 + sum(
                (n - 1) * stride for n, stride in zip(blocks.shape, blocks.strides, strict=True)
            )
            whole.append(np.lib.stride_tricks.as_strided(blocks, (size_bytes,), (1,)).data)
        return whole

    def copy_out(self, layer: int, block_ids: Sequence[int], rows: HostRows, slots: Sequence[int]) -> Done:
        for block_id, slot in zip(block_ids, slots, strict=True):
            block = self._blocks[layer][block_id]
            # numpy releases the GIL for it
            np.copyto(rows.array[slot].reshape(block.shape), block)
        return REACHED

    def end_saves(self) -> None:
        return

    def begin_loads(self) -> None:
        return

    def engine_after(self, done: Done) -> None:
        return

    def max_blocks(self, num_layers: int, *, follows: bool = False) -> int:
        return self.layout.num_blocks

    def land(
        self,
        block_ids: Sequence[int],
        layer_begin: int,
        layer_end: int,
        *,
        timeout_ms: float,
        follows: bool = False,
    ) -> "_InPlace":
        return _InPlace(self._blocks, block_ids)

    def zero(self, block_ids: Sequence[int]) -> None:
        for blocks in self._blocks:
            for block_id in block_ids:
                blocks[block_id].fill(0)

    def delivered(self) -> Done:
        return REACHED


class _InPlace:
    def __init__(self, blocks: list[ByteArray], block_ids: Sequence[int]) -> None:
        self._blocks = blocks
        self._block_ids = block_ids

    def buffers(self, layer_begin: int, layer_end: int, index: int) -> list[memoryview]:
        views: list[memoryview] = []
        for blocks in self._blocks[layer_begin:layer_end]:
            views += _contiguous_runs(blocks[self._block_ids[index]])
        return views

    def deliver(self, layer: int, begin: int, end: int) -> None:
        return

    def release(self) -> None:
        return


def _contiguous_runs(block: ByteArray) -> list[memoryview]:
    """The block as few flat writable views: one when its bytes lie together, else one per outer piece."""
    if block.flags.c_contiguous:
        return [block.reshape(-1).data]
    if block.ndim == 1:
        raise ConfigError("the innermost axis of the KV cache is strided: its bytes cannot be moved as runs")
    return [run for piece in block for run in _contiguous_runs(piece)]
