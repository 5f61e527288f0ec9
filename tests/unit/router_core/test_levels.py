from hypothesis import given
from hypothesis import strategies as st

from router.core.levels import levels


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
    found = levels(masks.__getitem__, size)
    assert [depth for depth, _ in found] == sorted({depth for depth, _ in found}, reverse=True)
    result = {h: depth for depth, holders in found for h in range(71) if holders >> h & 1}
    assert result == naive_depths(masks)


@given(st.lists(st.integers(0, 255), max_size=40))
def test_with_holes_only_elements_really_held_are_found(masks: list[int]) -> None:
    seen = 0
    for depth, holders in levels(masks.__getitem__, len(masks)):
        assert masks[depth - 1] & holders == holders
        assert not seen & holders
        seen |= holders


def test_few_probes() -> None:
    probes = []

    def holders_at(index: int) -> int:
        probes.append(index)
        return 3 if index < 200 else 1

    assert levels(holders_at, 512) == [(512, 1), (200, 2)]
    assert len(probes) <= 2 * 10
