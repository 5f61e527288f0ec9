"""Where the bytes of a KV block lie in vLLM's KV cache tensors: pure geometry, whatever the memory.

A block's bytes are opaque to us and are moved whole, in the order in which they lie in memory: on CPU the
kernels pack a block's keys for the ISA, so nothing smaller than a block may be taken apart. Layers are
ordered by the numbers in their names, which is the order in which a model runs them.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvcore.errors import ConfigError

ByteArray = npt.NDArray[np.uint8]


class ByteSpan(NamedTuple):
    """A tensor seen as uint8: address of its first byte, sizes and strides in bytes, in its own order."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def array_span(name: str, array: ByteArray) -> ByteSpan:
    if array.dtype != np.uint8:
        raise ConfigError(f"KV cache of {name} must be viewed as bytes, not {array.dtype}")
    return ByteSpan(array.ctypes.data, array.shape, array.strides)


class KVLayout:
    """The layers of one KV cache group.

    `layers`: layer name -> span [num_blocks * k, ..., bytes], where one vLLM block is k consecutive entries
    of the first axis (k > 1: the attention kernel's blocks are smaller than vLLM's).
    Raises ConfigError when the tensors cannot be moved block by block.
    """

    def __init__(self, layers: Mapping[str, ByteSpan], num_blocks: int) -> None:
        if not layers:
            raise ConfigError("the engine registered no KV cache layers")
        unique: dict[int, str] = {}
        for name in sorted(layers, key=_layer_order):
            # Layers that share another's KV cache are registered as the same memory under two names.
            unique.setdefault(layers[name].address, name)
        self.layer_names = sorted(unique.values(), key=_layer_order)
        self.layer_index = {name: index for index, name in enumerate(self.layer_names)}
        self.num_blocks = num_blocks
        spans = [_split_blocks(name, layers[name], num_blocks) for name in self.layer_names]
        self._axes = _memory_order(spans[0])
        self._spans = [_in_order(span, self._axes) for span in spans]
        sizes = {int(np.prod(span.shape[1:])) for span in self._spans}
        if len(sizes) > 1:
            raise ConfigError(
                f"layers of different sizes per block ({sorted(sizes)} bytes) cannot share one object"
            )
        self.layer_size_bytes = sizes.pop()

    @property
    def num_layers(self) -> int:
        return len(self.layer_names)

    @property
    def block_size_bytes(self) -> int:
        """One block over all its layers: the size of its object in the store."""
        return self.layer_size_bytes * self.num_layers

    def blocks(self, layer: int) -> ByteSpan:
        """The layer as [num_blocks, axes of a block from the largest stride to the smallest]: read in this
        order, a block's bytes are those of its object in the store."""
        return self._spans[layer]

    def describe(self) -> str:
        """The byte order inside one block: axes from outer to inner as axis:size (axis 0 = kernel blocks)."""
        sizes = self._spans[0].shape[1:]
        return " ".join(f"{axis}:{size}" for axis, size in zip(self._axes, sizes, strict=True))


def _layer_order(name: str) -> tuple[tuple[int, ...], str]:
    return tuple(int(number) for number in re.findall(r"\d+", name)), name


def _split_blocks(name: str, span: ByteSpan, num_blocks: int) -> ByteSpan:
    """[num_blocks * k, ...] -> [num_blocks, k, ...], the same memory."""
    if num_blocks <= 0 or span.shape[0] % num_blocks or span.shape[0] == 0:
        raise ConfigError(
            f"KV cache of {name} has shape {span.shape}: its first axis is not made of {num_blocks} blocks"
        )
    per_block = span.shape[0] // num_blocks
    outer = span.strides[0]
    return ByteSpan(
        span.address,
        (num_blocks, per_block, *span.shape[1:]),
        (outer * per_block, outer, *span.strides[1:]),
    )


def _memory_order(blocks: ByteSpan) -> list[int]:
    """Axes inside a block from the largest stride to the smallest."""
    strides = blocks.strides[1:]
    return sorted(range(len(strides)), key=lambda axis: (-strides[axis], axis))


def _in_order(blocks: ByteSpan, axes: list[int]) -> ByteSpan:
    order = [0, *(axis + 1 for axis in axes)]
    return ByteSpan(
        blocks.address,
        tuple(blocks.shape[axis] for axis in order),
        tuple(blocks.strides[axis] for axis in order),
    )
