"""Remembered spans change nothing of the chain."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.block_hash import chain
from router.core.chain_memo import SPANS_BLOCKS, ChainMemo

BLOCK_BYTES = 4
SPAN_BLOCKS = SPANS_BLOCKS[-1]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 1200), st.binary(max_size=80), st.sampled_from([0, 7])),
        min_size=1,
        max_size=12,
    )
)
def test_hashes_are_those_of_the_plain_chain(prompts: list[tuple[int, int, bytes, int]]) -> None:
    memo = ChainMemo(BLOCK_BYTES, max_spans=3)
    for letter, shared_bytes, rest, seed in prompts:
        data = b"abcd"[letter : letter + 1] * shared_bytes + rest
        assert memo.hashes(data, seed) == chain(data, BLOCK_BYTES, seed, None)


@pytest.mark.parametrize("num_blocks", SPANS_BLOCKS)
def test_a_prefix_seen_before_is_not_hashed_again(num_blocks: int) -> None:
    memo = ChainMemo(BLOCK_BYTES)
    prefix = b"".join(number.to_bytes(BLOCK_BYTES, "big") for number in range(num_blocks))
    first, second = memo.hashes(prefix + b"one more", 0), memo.hashes(prefix + b"another one.", 0)
    assert all(a is b for a, b in zip(first[:num_blocks], second[:num_blocks], strict=True))
    assert first[num_blocks:] != second[num_blocks:]


def test_what_is_remembered_is_bounded() -> None:
    memo = ChainMemo(BLOCK_BYTES, max_spans=8)
    for number in range(100):
        memo.hashes(number.to_bytes(BLOCK_BYTES * SPAN_BLOCKS, "big"), 0)
    assert memo.num_spans == 8
