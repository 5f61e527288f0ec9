"""In which pieces objects come from another store."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from store_server.core.copying import Copy, batches, layer_steps


def copy(number: int, size_bytes: int = 100, num_layers: int = 4) -> Copy:
    name = number.to_bytes(32, "big")
    return Copy(name, name, b"", size_bytes, num_layers)


SHAPES = st.sampled_from([(100, 4), (100, 2), (4096, 4), (1 << 20, 1)])


@given(st.lists(SHAPES, max_size=40), st.integers(1, 1 << 21))
def test_batches_keep_the_order_have_one_shape_and_stay_below_the_limit(
    shapes: list[tuple[int, int]], max_bytes: int
) -> None:
    copies = [copy(number, *shape) for number, shape in enumerate(shapes)]
    found = list(batches(copies, max_bytes))
    assert [one for batch in found for one in batch] == copies
    for batch in found:
        assert len({(one.size_bytes, one.num_layers) for one in batch}) == 1
        assert len(batch) == 1 or sum(one.size_bytes for one in batch) <= max_bytes
    for before, after in itertools.pairwise(found):
        one_shape = (before[0].size_bytes, before[0].num_layers) == (after[0].size_bytes, after[0].num_layers)
        assert not one_shape or (len(before) + 1) * before[0].size_bytes > max_bytes


@given(st.integers(1, 64), st.integers(1, 80), st.integers(1, 4096), st.integers(1, 1 << 20))
def test_steps_cover_all_layers_in_order(
    num_keys: int, num_layers: int, layer_bytes: int, step_bytes: int
) -> None:
    batch = [copy(number, num_layers * layer_bytes, num_layers) for number in range(num_keys)]
    steps = list(layer_steps(batch, step_bytes))
    assert [layer for begin, end in steps for layer in range(begin, end)] == list(range(num_layers))
    for begin, end in steps:
        assert end - begin == 1 or (end - begin) * num_keys * layer_bytes <= step_bytes


def test_a_batch_of_one_layer_is_one_step() -> None:
    assert list(layer_steps([copy(1, 100, 1)], 10)) == [(0, 1)]
