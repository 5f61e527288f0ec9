import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.layout import (
    KVGeometry,
    as_views,
    extent_spans,
    first_bytes,
    layer_sizes_bytes,
    layer_span,
    split_views,
    total_bytes,
)


def test_geometry_of_a_llama_block():
    geometry = KVGeometry(
        block_size_tokens=16, num_layers=32, num_kv_heads=8, head_size=128, dtype_size_bytes=2
    )
    assert geometry.layer_size_bytes == 2 * 16 * 8 * 128 * 2
    assert geometry.object_size_bytes == 32 * 65536


@given(st.integers(0, 10_000), st.integers(1, 97))
def test_layers_tile_the_object(size_bytes, num_layers):
    sizes = layer_sizes_bytes(size_bytes, num_layers, 0, num_layers)
    assert len(sizes) == num_layers and sum(sizes) == size_bytes and max(sizes) - min(sizes) <= 1
    middle = num_layers // 2
    begin, end = layer_span(size_bytes, num_layers, middle, num_layers)
    assert (begin, end) == (sum(sizes[:middle]), size_bytes)
    assert layer_sizes_bytes(size_bytes, num_layers, middle, num_layers) == sizes[middle:]


def test_views_share_memory_and_flatten_shapes():
    array = np.zeros((4, 8), dtype=np.float32)
    (view,) = as_views(array)
    view[:] = b"\x01" * 128
    assert array.view(np.uint8).all()
    assert [len(view) for view in as_views([array[0], (bytearray(3), np.zeros((0, 5)))])] == [32, 3, 0]
    with pytest.raises(TypeError, match="contiguous"):
        as_views(array[:, ::2])
    with pytest.raises(TypeError):
        as_views(3.5)


@given(st.lists(st.binary(max_size=9), max_size=6), st.data())
def test_split_is_a_slicing_of_the_concatenation(parts, data):
    whole = b"".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    sizes = [b - a for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    runs = split_views([memoryview(part) for part in parts], sizes)
    joined = [b"".join(run) for run in runs]
    assert b"".join(joined) == whole and [len(run) for run in joined] == sizes
    assert total_bytes(view for run in runs for view in run) == len(whole)
    with pytest.raises(ValueError, match="shorter"):
        split_views([memoryview(part) for part in parts], [len(whole) + 1])


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.data())
def test_extents_are_read_as_if_concatenated(sizes, data):
    pool = bytes(range(200))
    offsets = [17 * index + 3 for index in range(len(sizes))][::-1]
    extents = [number for pair in zip(offsets, sizes, strict=True) for number in pair]
    whole = b"".join(pool[offset : offset + size] for offset, size in zip(offsets, sizes, strict=True))
    begin = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(begin, len(whole)))
    spans = extent_spans(extents, begin, end)
    assert b"".join(pool[offset : offset + size] for offset, size in spans) == whole[begin:end]
    with pytest.raises(ValueError, match="do not reach"):
        extent_spans(extents, 0, len(whole) + 1)


@given(st.lists(st.binary(max_size=6), max_size=6), st.integers(1, 20))
def test_the_first_bytes_lie_in_the_first_views(parts: list[bytes], size_bytes: int) -> None:
    views = first_bytes([memoryview(part) for part in parts], size_bytes)
    assert b"".join(views) == b"".join(parts)[:size_bytes]
