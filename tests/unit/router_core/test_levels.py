from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from router.core.block import Block
from router.core.levels import levels

ALL = -1


def chain(masks: list[int]) -> dict[int, Block]:
    """Blocks by number, each with these holders."""
    return {n: Block(n, n, None, mask, 0, False) for n, mask in enumerate(masks)}


def naive_depths(masks: list[int]) -> dict[int, int]:
    depths: dict[int, int] = {}
    for depth, mask in enumerate(masks, 1):
        for holder in range(mask.bit_length()):
            if mask >> holder & 1:
                depths[holder] = depth
    return depths


@given(st.dictionaries(st.integers(0, 70), st.integers(1, 40), max_size=12), st.integers(0, 40))
def test_every_depth_is_found_when_prefixes_are_whole(depth_of: dict[int, int], size: int) -> None:
    masks = [sum(1 << holder for holder, depth in depth_of.items() if depth > i) for i in range(size)]
    found = levels(chain(masks), range(size), ALL)
    assert [depth for depth, _ in found] == sorted({depth for depth, _ in found}, reverse=True)
    result = {h: depth for depth, holders in found for h in range(71) if holders >> h & 1}
    assert result == naive_depths(masks)


@given(st.lists(st.integers(0, 255), max_size=40))
def test_with_holes_only_elements_really_held_are_found(masks: list[int]) -> None:
    seen = 0
    for depth, holders in levels(chain(masks), range(len(masks)), ALL):
        assert masks[depth - 1] & holders == holders
        assert not seen & holders
        seen |= holders


def test_holders_that_do_not_count_and_blocks_that_are_gone() -> None:
    blocks = chain([0b111, 0b111, 0b101])
    assert levels(blocks, range(3), 0b110) == [(3, 0b100), (2, 0b010)]
    del blocks[2]
    assert levels(blocks, range(3), 0b110) == [(2, 0b110)]
    assert levels(blocks, range(3), 0) == levels(blocks, [7, 8], ALL) == levels({}, [], ALL) == []


class Counted(dict[int, Block]):
    num_looks = 0

    def get(self, key: int, default: Any = None) -> Any:
        self.num_looks += 1
        return super().get(key, default)


def test_few_looks() -> None:
    blocks = Counted(chain([3] * 200 + [1] * 312))
    assert levels(blocks, range(512), ALL) == [(512, 1), (200, 2)]
    assert blocks.num_looks <= 2 + 9


def test_what_was_looked_at_for_one_depth_serves_the_next() -> None:
    depth_of = {holder: 8 * (holder + 1) for holder in range(64)}
    masks = [sum(1 << holder for holder, depth in depth_of.items() if depth > i) for i in range(512)]
    blocks = Counted(chain(masks))
    assert levels(blocks, range(512), ALL) == [(depth, 1 << h) for h, depth in reversed(depth_of.items())]
    # 64 bisections of 512 elements would be 576.
    assert blocks.num_looks <= 64 * 4 + 2
