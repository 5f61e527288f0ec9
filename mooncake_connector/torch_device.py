"""A torch accelerator (CUDA, ROCm, XPU) as a Device; CPU tensors work too, with queues that need no order.

A layer's blocks are gathered into one piece of device memory by a kernel, and that piece crosses the link in
one copy; the other way round for loads. Both pieces have a fixed size and are made at the start: an engine
leaves little device memory free.
"""

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from kvcore.errors import ConfigError
from kvcore.units import format_size
from mooncake_connector.device import Lane
from mooncake_connector.kv_layout import KVLayout
from mooncake_connector.kv_memory import REACHED, Done, HostRows

# Enough to keep a link busy while the next piece is gathered; twice of it is taken from the device.
BOUNCE_SIZE_BYTES = 8 << 20
_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class TorchDevice:
    """`tensors`: the KV cache tensors in the order of layout.layer_names. `module` is torch's module for the
    tensors' kind of device (torch.cuda); without one, as for the CPU, work is done as it is queued.

    Raises ConfigError for a device whose work cannot be put in order.
    """

    def __init__(self, tensors: Sequence[Any], layout: KVLayout, module: Any = None) -> None:
        self._device = tensors[0].device
        if module is None and self._device.type != "cpu":
            module = getattr(torch, self._device.type, None)
            if not (hasattr(module, "Stream") and hasattr(module, "Event")):
                raise ConfigError(f"the KV cache lies on {self._device}, which has no streams")
        self._module = module
        self._pins = self._device.type != "cpu"
        self._layer_size_bytes = layout.layer_size_bytes
        self._blocks = [_block_view(tensor, layout, layer) for layer, tensor in enumerate(tensors)]
        self._bounce_rows = max(1, BOUNCE_SIZE_BYTES // layout.layer_size_bytes)
        side_lanes = (Lane.SAVE, Lane.LOAD)
        self._streams = {lane: module.Stream(device=self._device) for lane in side_lanes} if module else {}
        # Whoever queues on a lane uses its bounce until the next who queues there.
        self._locks = {lane: threading.Lock() for lane in side_lanes}
        bounce_size_bytes = self._bounce_rows * layout.layer_size_bytes
        self._bounce = {lane: _allocate(bounce_size_bytes, device=self._device) for lane in side_lanes}

    # ---- order

    def mark(self, lane: Lane) -> Done:
        if self._module is None:
            return REACHED
        return _Mark(self._module, self._stream(lane))

    def order(self, lane: Lane, done: Done) -> None:
        if isinstance(done, _Mark):
            self._stream(lane).wait_event(done.event)

    def _stream(self, lane: Lane) -> Any:
        return self._module.current_stream(self._device) if lane is Lane.COMPUTE else self._streams[lane]

    def _queueing(self, lane: Lane) -> AbstractContextManager[Any]:
        return self._module.stream(self._streams[lane]) if self._module is not None else nullcontext()

    # ---- work

    def make_rows(self, num_rows: int, row_size_bytes: int) -> HostRows:
        memory = _allocate(num_rows, row_size_bytes, device="cpu", pin_memory=self._pins)
        return HostRows(memory.numpy(), memory)

    def gather(self, layer: int, block_ids: Sequence[int], rows: HostRows, first_row: int) -> None:
        with self._locks[Lane.SAVE], self._queueing(Lane.SAVE):
            for begin, end in self._pieces(len(block_ids)):
                piece, blocks = self._piece(Lane.SAVE, layer, end - begin)
                torch.index_select(self._blocks[layer], 0, self._index(block_ids[begin:end]), out=blocks)
                rows.handle[first_row + begin : first_row + end].copy_(piece, non_blocking=True)

    def scatter(self, layer: int, block_ids: Sequence[int], rows: HostRows, first_row: int) -> None:
        with self._locks[Lane.LOAD], self._queueing(Lane.LOAD):
            for begin, end in self._pieces(len(block_ids)):
                piece, blocks = self._piece(Lane.LOAD, layer, end - begin)
                piece.copy_(rows.handle[first_row + begin : first_row + end], non_blocking=True)
                self._blocks[layer].index_copy_(0, self._index(block_ids[begin:end]), blocks)

    def zero(self, block_ids: Sequence[int]) -> None:
        with self._queueing(Lane.LOAD):
            index = self._index(block_ids)
            for blocks in self._blocks:
                blocks.index_fill_(0, index, 0)

    def _pieces(self, num_blocks: int) -> Iterator[tuple[int, int]]:
        for begin in range(0, num_blocks, self._bounce_rows):
            yield begin, min(begin + self._bounce_rows, num_blocks)

    def _piece(self, lane: Lane, layer: int, num_blocks: int) -> tuple[Any, Any]:
        """The lane's bounce as uint8 [num_blocks, layer_size_bytes], and as blocks of the layer."""
        memory = self._bounce[lane][: num_blocks * self._layer_size_bytes]
        like = self._blocks[layer]
        blocks = memory.view(like.dtype).view(num_blocks, *like.shape[1:])
        return memory.view(num_blocks, self._layer_size_bytes), blocks

    def _index(self, block_ids: Sequence[int]) -> Any:
        """From pinned memory: a copy out of pageable memory would wait for all that is queued before it."""
        index = torch.tensor(block_ids, dtype=torch.int64, device="cpu", pin_memory=self._pins)
        return index.to(self._device, non_blocking=True)


def _allocate(*shape: int, device: Any, pin_memory: bool = False) -> Any:
    """Bytes. Raises ConfigError when there is no memory for them."""
    try:
        # Tensors made in inference mode can be written only in it, and load threads are not.
        with torch.inference_mode(False):
            return torch.empty(shape, dtype=torch.uint8, device=device, pin_memory=pin_memory)
    except RuntimeError as error:
        kind = "pinned host memory" if pin_memory else f"memory on {device}"
        raise ConfigError(f"no {format_size(math.prod(shape))} of {kind} for staging: {error}") from error


class _Mark:
    def __init__(self, module: Any, stream: Any) -> None:
        # Without `blocking`, CUDA's wait() would take a whole core; other modules do not know the word.
        self.event = module.Event(blocking=True) if module is torch.cuda else module.Event()
        self.event.record(stream)

    def wait(self) -> None:
        self.event.synchronize()


def _block_view(tensor: Any, layout: KVLayout, layer: int) -> Any:
    """layout.blocks(layer) as a tensor of the widest integers that fit: kernels then move fewer elements, and
    not every kernel knows every dtype of KV caches (fp8)."""
    _, shape, strides = layout.blocks(layer)
    offset_bytes = tensor.storage_offset() * tensor.element_size()
    sizes = (offset_bytes, shape[-1], *strides[:-1])
    width = next(width for width in _INTEGERS if all(size % width == 0 for size in sizes))
    if strides[-1] != 1:
        width = 1
    with torch.inference_mode(False):
        return torch.empty(0, dtype=_INTEGERS[width], device=tensor.device).set_(
            tensor.untyped_storage(),
            offset_bytes // width,
            (*shape[:-1], shape[-1] // width),
            (*(stride // width for stride in strides[:-1]), strides[-1]),
        )
