from array import array

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from router.core.block_hash import block_hashes, root_seed, text_block_hashes

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=60)


@given(tokens, st.integers(1, 8))
def test_each_hash_covers_all_blocks_before_it(token_ids: list[int], block_size: int) -> None:
    expected = []
    seed = 0
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        block = array("I", token_ids[start : start + block_size]).tobytes()
        seed = xxhash.xxh3_64_intdigest(block, seed)
        expected.append(seed)
    assert block_hashes(token_ids, block_size) == expected


@given(tokens, st.integers(0, 60))
def test_going_on_from_the_middle_gives_the_same_chain(token_ids: list[int], cut: int) -> None:
    whole = block_hashes(token_ids, 4)
    cut = min(cut // 4, len(whole))
    seed = whole[cut - 1] if cut else 0
    assert whole[:cut] + block_hashes(token_ids[cut * 4 :], 4, seed) == whole


def test_a_partial_last_block_has_no_hash() -> None:
    assert len(block_hashes(range(11), 4)) == 2
    assert block_hashes(range(3), 4) == []


def test_salt_and_lora_separate_equal_tokens() -> None:
    seeds = {root_seed(), root_seed("lora"), root_seed("", "lora"), root_seed("lora", "salt")}
    assert len(seeds) == 4
    assert root_seed() == 0
    assert len({block_hashes(range(8), 4, seed)[1] for seed in seeds}) == 4


def test_extra_keys_change_their_block_and_all_after_it() -> None:
    plain = block_hashes(range(12), 4)
    with_image = block_hashes(range(12), 4, extra_keys={1: ["image", 3]})
    assert with_image[0] == plain[0]
    assert with_image[1] != plain[1] and with_image[2] != plain[2]
    assert with_image != block_hashes(range(12), 4, extra_keys={1: ["image", 4]})


def test_text_blocks() -> None:
    hashes = text_block_hashes(b"x" * 300, 128)
    assert len(hashes) == 2
    assert text_block_hashes(b"x" * 256 + b"y", 128) == hashes


def test_a_token_that_is_no_u32_is_refused() -> None:
    with pytest.raises(OverflowError):
        block_hashes([-1], 1)
