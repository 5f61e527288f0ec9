"""KV tensors as bytes: any order of axes goes out and comes back the same."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.errors import ConfigError
from mooncake_connector.host_memory import HostMemory
from mooncake_connector.kv_memory import plain_rows
from tests.unit.mooncake_connector.rig import host_memory, make_layers


def buffers(memory: HostMemory, layer_begin: int, layer_end: int, block_id: int) -> list[memoryview]:
    landing = memory.land([block_id], layer_begin, layer_end, timeout_ms=0)
    return landing.buffers(layer_begin, layer_end, 0)


def strided_layer(order: tuple[int, ...], num_blocks: int, kernel_blocks: int, inner: int) -> Any:
    """A logical [blocks * k, heads, tokens, bytes] array whose axes lie in memory in `order`."""
    shape = (num_blocks * kernel_blocks, 2, 4, inner)
    memory = np.zeros([shape[axis] for axis in order], dtype=np.uint8)
    return memory.transpose(np.argsort(order))


@given(
    order=st.sampled_from([(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3), (2, 0, 1, 3), (1, 2, 0, 3)]),
    num_blocks=st.integers(1, 5),
    kernel_blocks=st.integers(1, 3),
    inner=st.integers(1, 9),
    seed=st.integers(0, 2**16),
)
def test_a_block_moves_whole_and_touches_no_other(
    order: tuple[int, ...], num_blocks: int, kernel_blocks: int, inner: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    source, target = (strided_layer(order, num_blocks, kernel_blocks, inner) for _ in range(2))
    source[...] = rng.integers(0, 255, source.shape, dtype=np.uint8)
    out, back = HostMemory({"l.0": source}, num_blocks), HostMemory({"l.0": target}, num_blocks)
    assert out.layout.describe() == back.layout.describe()
    block_from, block_to = int(rng.integers(num_blocks)), int(rng.integers(num_blocks))
    rows = plain_rows(2, out.layout.layer_size_bytes)
    out.copy_out(0, [block_from], rows, [1])
    row = rows.row(1)
    assert row.tobytes() == b"".join(buffers(out, 0, 1, block_from))
    position = 0
    for view in buffers(back, 0, 1, block_to):
        view[:] = row[position : position + len(view)]
        position += len(view)
    assert position == back.layout.block_size_bytes
    k = kernel_blocks
    expected = np.zeros_like(source)
    expected[block_to * k : (block_to + 1) * k] = source[block_from * k : (block_from + 1) * k]
    assert np.array_equal(target, expected)


def test_contiguous_blocks_are_one_buffer_a_layer() -> None:
    memory = host_memory(make_layers(num_layers=3))
    assert [len(view) for view in buffers(memory, 0, 3, 5)] == [memory.layout.layer_size_bytes] * 3


def test_layers_are_in_the_order_of_their_numbers() -> None:
    layers = {f"model.layers.{layer}.attn": array for layer, array in enumerate(make_layers(12).values())}
    memory = HostMemory(dict(reversed(layers.items())), 16)
    assert memory.layout.layer_names == list(layers)


def test_a_layer_that_shares_anothers_cache_is_moved_once() -> None:
    layers = make_layers(2)
    layers["model.layers.9.attn"] = layers["model.layers.0.attn"]
    assert host_memory(layers).layout.num_layers == 2


def test_axes_of_equal_size_in_another_order_are_another_layout() -> None:
    heads_first = HostMemory({"l": np.zeros((2, 4, 4, 8), np.uint8)}, 2).layout
    tokens_first = HostMemory({"l": np.zeros((2, 4, 4, 8), np.uint8).transpose(0, 2, 1, 3)}, 2).layout
    assert heads_first.describe() != tokens_first.describe()


def test_zero_reaches_every_layer_of_the_given_blocks_only() -> None:
    layers = make_layers(fill=7)
    host_memory(layers).zero([3, 5])
    for array in layers.values():
        assert not array[[3, 5]].any()
        assert (np.delete(array, [3, 5], axis=0) == 7).all()


@pytest.mark.parametrize(
    ("layers", "num_blocks", "reason"),
    [
        ({}, 4, "no KV cache layers"),
        ({"l": np.zeros((5, 8), np.uint8)}, 4, "not made of 4 blocks"),
        ({"l": np.zeros((4, 8), np.float32)}, 4, "as bytes"),
        ({"l.0": np.zeros((4, 8), np.uint8), "l.1": np.zeros((4, 9), np.uint8)}, 4, "different sizes"),
    ],
)
def test_what_cannot_be_moved_is_refused(layers: dict[str, Any], num_blocks: int, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        HostMemory(layers, num_blocks)


def test_a_strided_innermost_axis_is_refused() -> None:
    memory = HostMemory({"l": np.zeros((4, 8, 2), np.uint8)[:, :, 0]}, 4)
    with pytest.raises(ConfigError, match="strided"):
        buffers(memory, 0, 1, 0)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3)])
def test_what_blocks_arrive_in_can_be_registered_beforehand(order: tuple[int, ...]) -> None:
    layers = {f"l.{layer}": np.zeros((6, 2, 3, 8), np.uint8).transpose(order) for layer in range(3)}
    memory = HostMemory(layers, 6)
    spans = [(np.frombuffer(view, np.uint8).ctypes.data, len(view)) for view in memory.arrivals()]
    assert sum(size for _, size in spans) == 3 * 6 * 2 * 3 * 8
    for block_id in range(6):
        for view in buffers(memory, 0, 3, block_id):
            address = np.frombuffer(view, np.uint8).ctypes.data
            assert any(begin <= address and address + len(view) <= begin + size for begin, size in spans)
