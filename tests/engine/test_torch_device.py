"""TorchDevice against naive copies on CPU tensors, and its use of streams against a recorder.

No test here needs an accelerator, and none shows that one works: what is shown is which bytes are moved, and
which stream is told to wait for which event.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.errors import ConfigError
from mooncake_connector.config import ConnectorConfig
from mooncake_connector.host_memory import HostMemory
from mooncake_connector.staged_memory import StagedMemory

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

NUM_BLOCKS, NUM_LAYERS, HEADS, TOKENS = 6, 3, 2, 4
# Outer to inner; L layer, B block, H head, N token, C channel. CPU engines have the first one.
LAYOUTS = ["LBHNC", "LBNHC", "BLHNC", "BLNHC", "BHLNC", "LHBNC"]
DTYPES = ["float32", "bfloat16", "float8_e4m3fn", "int8"]


def make_tensors(order: str, dtype: str, channels: int, kernel_blocks: int = 1) -> dict[str, Any]:
    """Logical [num_blocks * k, H, N, C] views of one storage whose axes lie in memory in `order`."""
    import torch

    sizes = {"L": NUM_LAYERS, "B": NUM_BLOCKS * kernel_blocks, "H": HEADS, "N": TOKENS, "C": channels}
    shape = [sizes[axis] for axis in order]
    num_bytes = int(np.prod(shape)) * getattr(torch, dtype).itemsize
    memory = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8).view(getattr(torch, dtype)).view(shape)
    logical = memory.permute(*(order.index(axis) for axis in "LBHNC"))
    return {f"model.layers.{layer}.attn": logical[layer] for layer in range(NUM_LAYERS)}


def staged(tensors: dict[str, Any]) -> StagedMemory:
    from mooncake_connector.tensors import open_kv_memory

    config = ConnectorConfig(staging="always", load_staging_size_bytes=1 << 20)
    memory = open_kv_memory(tensors, NUM_BLOCKS, config)
    assert isinstance(memory, StagedMemory)
    return memory


def raw(tensors: dict[str, Any]) -> list[Any]:
    """Each layer's bytes as its tensor has them, [num_blocks * k, ...]; a copy."""
    import torch

    return [tensor.contiguous().view(torch.uint8).numpy().copy() for tensor in tensors.values()]


settings_of_a_cache = {
    "order": st.sampled_from(LAYOUTS),
    "dtype": st.sampled_from(DTYPES),
    "channels": st.sampled_from([1, 3, 8]),
    "kernel_blocks": st.integers(1, 2),
    "block_ids": st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, max_size=NUM_BLOCKS, unique=True),
    "bounce_rows": st.integers(1, 7),
}


@settings(max_examples=60, deadline=None)
@given(**settings_of_a_cache)
def test_gather_takes_the_bytes_that_a_cache_in_host_memory_would_give(
    order: str, dtype: str, channels: int, kernel_blocks: int, block_ids: list[int], bounce_rows: int
) -> None:
    from mooncake_connector.tensors import host_bytes

    tensors = make_tensors(order, dtype, channels, kernel_blocks)
    memory = staged(tensors)
    memory._device._bounce_rows = bounce_rows  # type: ignore[attr-defined]
    direct = HostMemory({name: host_bytes(tensor) for name, tensor in tensors.items()}, NUM_BLOCKS)
    assert memory.layout.describe() == direct.layout.describe(), "another namespace for the same bytes"
    size_bytes = direct.layout.layer_size_bytes
    slots = [slot + 2 * (slot > 2) for slot in range(len(block_ids))]  # not all of them in one run
    for layer in range(NUM_LAYERS):
        one, other = (each.make_rows(NUM_BLOCKS + 2, size_bytes) for each in (memory, direct))
        memory.copy_out(layer, block_ids, one, slots).wait()
        direct.copy_out(layer, block_ids, other, slots)
        assert np.array_equal(one.array[slots], other.array[slots])


@settings(max_examples=60, deadline=None)
@given(**settings_of_a_cache, num_zero=st.integers(0, 2))
def test_what_lands_is_in_the_given_blocks_and_nowhere_else(
    order: str,
    dtype: str,
    channels: int,
    kernel_blocks: int,
    block_ids: list[int],
    bounce_rows: int,
    num_zero: int,
) -> None:
    source, target = (make_tensors(order, dtype, channels, kernel_blocks) for _ in range(2))
    expected, wanted = raw(target), raw(source)
    memory, k = staged(target), kernel_blocks
    memory._device._bounce_rows = bounce_rows  # type: ignore[attr-defined]
    reader = staged(source)
    rows = reader.make_rows(len(block_ids), reader.layout.layer_size_bytes)
    landing = memory.land(block_ids, 0, NUM_LAYERS, timeout_ms=0)
    assert landing is not None
    for layer in range(NUM_LAYERS):
        reader.copy_out(layer, block_ids, rows, range(len(block_ids))).wait()
        for index in range(len(block_ids)):
            [view] = landing.buffers(layer, layer + 1, index)
            view[:] = rows.row(index)
    for layer in range(NUM_LAYERS):
        landing.deliver(layer, 0, len(block_ids) - num_zero)
    landing.release()
    gone = block_ids[max(0, len(block_ids) - num_zero) :]
    memory.zero(gone)
    memory.delivered().wait()
    for layer in range(NUM_LAYERS):
        for block_id in block_ids:
            block = slice(block_id * k, (block_id + 1) * k)
            expected[layer][block] = 0 if block_id in gone else wanted[layer][block]
        assert np.array_equal(raw(target)[layer], expected[layer])


def test_kernels_move_the_widest_integers_that_fit() -> None:
    import torch

    cases = [
        ("float32", 8, torch.int64),
        ("bfloat16", 3, torch.int16),
        ("int8", 3, torch.uint8),
    ]
    for dtype, channels, wide in cases:
        device: Any = staged(make_tensors("LBHNC", dtype, channels))._device
        assert {blocks.dtype for blocks in device._blocks} == {wide}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda tensors: {n: t[..., ::2] for n, t in tensors.items()}, "strided"),
        (lambda tensors: {n: t.to("meta") if "0" in n else t for n, t in tensors.items()}, "several devices"),
        (lambda tensors: {n: t.to("meta") for n, t in tensors.items()}, "meta"),
    ],
)
def test_what_cannot_be_staged_is_refused_with_a_reason(change: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        staged(change(make_tensors("LBHNC", "float32", 8)))


def test_too_large_a_staging_area_is_refused_with_its_size() -> None:
    memory: Any = staged(make_tensors("LBHNC", "float32", 8))
    with pytest.raises(ConfigError, match=r"no .*TiB.* for staging"):
        memory.make_rows(1 << 40, 1 << 20)


# ---- streams


class Recorder:
    """Stands for torch.cuda: writes down what is asked of it, and on which stream copies are queued."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.names = iter(["save", "load"])
        self.num_events = 0
        self.current = "compute"

    def Stream(self, device: Any) -> Any:
        return self._stream(next(self.names))

    def current_stream(self, device: Any) -> Any:
        return self._stream(self.current)

    def _stream(self, name: str) -> Any:
        wait = lambda event: self.log.append((name, "waits for", event.name))  # noqa: E731
        return SimpleNamespace(name=name, wait_event=wait)

    def Event(self) -> Any:
        self.num_events += 1
        event = SimpleNamespace(name=self.num_events)
        event.record = lambda stream: self.log.append((stream.name, "records", event.name))
        event.synchronize = lambda: self.log.append(("host", "waits for", event.name))
        return event

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.log.append((stream.name, "copies"))
        before, self.current = self.current, stream.name
        yield
        self.current = before


def on_streams() -> tuple[StagedMemory, Recorder]:
    from mooncake_connector.torch_device import TorchDevice

    tensors, recorder = make_tensors("LBNHC", "bfloat16", 8), Recorder()
    layout = staged(tensors).layout
    device = TorchDevice(list(tensors.values()), layout, recorder)
    return StagedMemory(layout, device, 1 << 20), recorder


def test_saves_are_ordered_by_events_and_only_the_save_thread_waits() -> None:
    memory, recorder = on_streams()
    rows = memory.make_rows(8, memory.layout.layer_size_bytes)
    done = memory.copy_out(0, [3, 4, 1], rows, [0, 1, 5])
    assert recorder.log == [
        ("compute", "records", 1),
        ("save", "waits for", 1),
        ("save", "copies"),
        ("save", "copies"),
        ("save", "records", 2),
    ]
    recorder.log.clear()
    memory.end_saves()
    assert recorder.log == [("compute", "waits for", 2)]
    memory.end_saves()
    assert recorder.log == [("compute", "waits for", 2)], "once is enough"
    done.wait()
    assert recorder.log[-1] == ("host", "waits for", 2)


def test_loads_are_ordered_by_events_and_a_buffer_is_used_again_after_its_copies() -> None:
    memory, recorder = on_streams()
    memory.begin_loads()
    landing = memory.land([1, 2], 0, 1, timeout_ms=0)
    assert landing is not None
    landing.deliver(0, 0, 2)
    landing.release()
    done = memory.delivered()
    memory.engine_after(done)
    assert recorder.log == [
        ("compute", "records", 1),
        ("load", "waits for", 1),
        ("load", "copies"),
        ("load", "records", 2),
        ("load", "records", 3),
        ("compute", "waits for", 3),
    ]
    recorder.log.clear()
    ring = memory._sealed
    for _ in range(ring.num_free):
        memory.land([1], 0, 1, timeout_ms=0)
    assert recorder.log == [("host", "waits for", 2)]
