"""Pages of SGLang's device pools, layer by layer, by way of pinned host memory. For the linker.

Gathering and scattering are torch's own operators, the same on every kind of device. What has been run is CPU
tensors; no GPU has been at hand (docs/sglang.md).
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from sglang_hicache_backend.keys import PoolFacts
from sglang_hicache_backend.layouts import tensor_bytes


class DevicePages:
    """One device pool, given as SGLang's DevicePoolEntry (0.5.23, hybrid_cache/linker_pool_assembler.py).

    An object holds a page's layers one behind the other, each with all of its parts (keys and values; the
    states of a recurrent layer). Where all layers have the same size they can be read one by one, else the
    object is read as a whole with its first layer.
    """

    def __init__(self, entry: Any, name: str, *, is_replicated: bool) -> None:
        self._entry = entry
        self.engine_layers = sorted(entry.layer_mapping)
        self._parts = [self._parts_of(layer) for layer in self.engine_layers]
        sizes_bytes = [sum(size for _, size in parts) for parts in self._parts]
        self.is_layered = len(set(sizes_bytes)) == 1
        self.object_size_bytes = sum(sizes_bytes)
        self.step_size_bytes = sizes_bytes[0] if self.is_layered else self.object_size_bytes
        first, last = self.engine_layers[0], self.engine_layers[-1]
        sizes_text = "+".join(str(size) for parts in self._parts[:1] for _, size in parts)
        self.facts = PoolFacts(
            name=name,
            kind=type(entry.device_pool).__name__,
            dtype=",".join(sorted({str(tensor.dtype) for tensor, _ in self._parts[0]})),
            form=f"device layers={first}-{last} layer by layer {sizes_text}",
            page_size_tokens=int(entry.page_size),
            object_size_bytes=self.object_size_bytes,
            num_layers=len(self.engine_layers),
            object_layers=len(self.engine_layers) if self.is_layered else 1,
            is_replicated=is_replicated,
        )

    def rows(self, device_indices: Any) -> list[int]:
        """Where each page begins in the pool's tensors. ValueError for slots that are not whole pages."""
        found: list[int] = self._entry.prepare_locations(device_indices)
        return found

    def steps(self) -> Iterator[tuple[int, range]]:
        """What is read in one go: (the engine's layer it is for, its layers within the object)."""
        if not self.is_layered:
            yield self.engine_layers[0], range(len(self.engine_layers))
            return
        for position, layer in enumerate(self.engine_layers):
            yield layer, range(position, position + 1)

    def gather(self, rows: Sequence[int], stage: torch.Tensor) -> None:
        """Whole objects of these pages, one a row, into the front of `stage` (bytes on the host)."""
        pieces = [
            tensor.view(torch.uint8).index_select(0, self._index(tensor, size, rows)).reshape(len(rows), size)
            for parts in self._parts
            for tensor, size in parts
        ]
        # Put together on the device: one large copy to the host instead of many small ones.
        objects = torch.cat(pieces, dim=1)
        stage[: objects.numel()].view(objects.shape).copy_(objects, non_blocking=True)

    def scatter(self, rows: Sequence[int], positions: range, stage: torch.Tensor) -> None:
        """Layers that have arrived in the front of `stage`, one page a row, to where they belong."""
        size_bytes = self.step_size_bytes
        source = stage[: len(rows) * size_bytes].view(len(rows), size_bytes)
        arrived = source.to(self._parts[0][0][0].device, non_blocking=True)
        begin = 0
        for position in positions:
            for tensor, size in self._parts[position]:
                target = tensor.view(torch.uint8)
                index = self._index(tensor, size, rows)
                pieces = arrived[:, begin : begin + size].reshape(len(index), *target.shape[1:])
                target.index_copy_(0, index, pieces)
                begin += size

    def _parts_of(self, layer: int) -> list[tuple[torch.Tensor, int]]:
        """The tensors that hold a layer, each with the bytes a page has in it."""
        mapped = self._entry.layer_mapping[layer]
        indices = [mapped] if isinstance(mapped, int) else list(mapped)
        return [
            (tensors[index], int(meta[index][2]))
            for tensors, meta in zip(self._entry.components, self._entry.buffer_meta, strict=True)
            for index in indices
        ]

    @staticmethod
    def _index(tensor: torch.Tensor, size_bytes: int, rows: Sequence[int]) -> torch.Tensor:
        rows_per_page = size_bytes // (tensor.nbytes // tensor.shape[0])
        first = torch.tensor(rows, dtype=torch.int64)
        index = (first[:, None] + torch.arange(rows_per_page)).reshape(-1)
        return index.to(tensor.device)


class Stage:
    """A piece of host memory that the device can copy to and from by itself; `view` are its bytes."""

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        self.tensor = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=device.type != "cpu")
        self.view = tensor_bytes(self.tensor)

    def pieces(self, count: int, size_bytes: int) -> list[memoryview]:
        return [self.view[first : first + size_bytes] for first in range(0, count * size_bytes, size_bytes)]


class SideStream:
    """Copies of one thread, beside the engine's own work. On CPU there is nothing to be beside."""

    def __init__(self, device_module: Any, device: torch.device) -> None:
        self._module = device_module
        self._stream: Any = None
        if device.type != "cpu":
            # A new thread begins on the first device, whichever its process uses.
            device_module.set_device(device)
            self._stream = device_module.Stream()

    def __enter__(self) -> None:
        self._context = self._module.stream(self._stream) if self._stream else contextlib.nullcontext()
        self._context.__enter__()

    def __exit__(self, *exc_info: Any) -> None:
        self._context.__exit__(*exc_info)

    def wait(self) -> None:
        """Until the copies so far have been made."""
        if self._stream is not None:
            self._stream.synchronize()
