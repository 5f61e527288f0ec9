"""Where the bytes of a KV block lie: vLLM's KV cache tensors as plain byte arrays, and back.

A block's bytes are opaque to us and are moved whole, in the order in which they lie in memory: on CPU the
kernels pack a block's keys for the ISA, so nothing smaller than a block may be taken apart. Layers are
ordered by the numbers in their names, which is the order in which a model runs them.
"""

import re
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvcore.errors import ConfigError

ByteArray = npt.NDArray[np.uint8]


class KVLayout:
    """The layers of one KV cache group in host memory. Never copies at construction, never owns the memory.

    `layers`: layer name -> uint8 array [num_blocks * k, ..., bytes], where one vLLM block is k consecutive
    entries of the first axis (k > 1: the attention kernel's blocks are smaller than vLLM's).
    Raises ConfigError when the tensors cannot be moved block by block.
    """

    def __init__(self, layers: Mapping[str, ByteArray], num_blocks: int) -> None:
        if not layers:
            raise ConfigError("the engine registered no KV cache layers")
        unique: dict[int, str] = {}
        for name in sorted(layers, key=_layer_order):
            # Layers that share another's KV cache are registered as the same memory under two names.
            unique.setdefault(layers[name].ctypes.data, name)
        self.layer_names = sorted(unique.values(), key=_layer_order)
        self.layer_index = {name: index for index, name in enumerate(self.layer_names)}
        self.num_blocks = num_blocks
        self._axes = _memory_order(
            _split_blocks(self.layer_names[0], layers[self.layer_names[0]], num_blocks)
        )
        self._blocks = [
            blocks.transpose(0, *(axis + 1 for axis in self._axes))
            for blocks in (_split_blocks(name, layers[name], num_blocks) for name in self.layer_names)
        ]
        sizes = {blocks[0].nbytes for blocks in self._blocks}
        if len(sizes) > 1:
            raise ConfigError(
                f"layers of different sizes per block ({sorted(sizes)} bytes) cannot share one object"
            )
        self.layer_size_bytes = int(sizes.pop())

    @property
    def num_layers(self) -> int:
        return len(self.layer_names)

    @property
    def block_size_bytes(self) -> int:
        """One block over all its layers: the size of its object in the store."""
        return self.layer_size_bytes * self.num_layers

    def describe(self) -> str:
        """The byte order inside one block: axes from outer to inner as axis:size (axis 0 = kernel blocks)."""
        return " ".join(
            f"{axis}:{size}" for axis, size in zip(self._axes, self._blocks[0][0].shape, strict=True)
        )

    def buffers(self, layer_begin: int, layer_end: int, block_id: int) -> list[memoryview]:
        """Writable views of the block's bytes in layers [layer_begin, layer_end), as its object has them."""
        views: list[memoryview] = []
        for blocks in self._blocks[layer_begin:layer_end]:
            views += _contiguous_runs(blocks[block_id])
        return views

    def copy_out(self, layer: int, block_id: int, into: ByteArray) -> None:
        """Copies one layer of a block to `into` (uint8 [layer_size_bytes]); numpy releases the GIL for it."""
        block = self._blocks[layer][block_id]
        np.copyto(into.reshape(block.shape), block)

    def zero(self, block_ids: Sequence[int]) -> None:
        """Fills blocks with zeros: attention reads whole blocks, and 0 * NaN would spoil other requests."""
        for blocks in self._blocks:
            for block_id in block_ids:
                blocks[block_id].fill(0)


def _layer_order(name: str) -> tuple[tuple[int, ...], str]:
    return tuple(int(number) for number in re.findall(r"\d+", name)), name


def _split_blocks(name: str, array: ByteArray, num_blocks: int) -> ByteArray:
    """[num_blocks * k, ...] -> [num_blocks, k, ...], a view."""
    if array.dtype != np.uint8:
        raise ConfigError(f"KV cache of {name} must be viewed as bytes, not {array.dtype}")
    if num_blocks <= 0 or array.shape[0] % num_blocks or array.shape[0] == 0:
        raise ConfigError(
            f"KV cache of {name} has shape {array.shape}: its first axis is not made of {num_blocks} blocks"
        )
    per_block = array.shape[0] // num_blocks
    outer = array.strides[0]
    return np.lib.stride_tricks.as_strided(
        array,
        shape=(num_blocks, per_block, *array.shape[1:]),
        strides=(outer * per_block, outer, *array.strides[1:]),
    )


def _memory_order(blocks: ByteArray) -> list[int]:
    """Axes inside a block from the largest stride to the smallest."""
    strides = blocks.strides[1:]
    return sorted(range(len(strides)), key=lambda axis: (-strides[axis], axis))


def _contiguous_runs(block: ByteArray) -> list[memoryview]:
    """The block as few flat writable views: one when its bytes lie together, else one per outer piece."""
    if block.flags.c_contiguous:
        return [block.reshape(-1).data]
    if block.ndim == 1:
        raise ConfigError("the innermost axis of the KV cache is strided: its bytes cannot be moved as runs")
    return [run for piece in block for run in _contiguous_runs(piece)]
