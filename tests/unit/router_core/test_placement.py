from hypothesis import given
from hypothesis import strategies as st

from router.core.placement import ANCHOR_STRIDE_BLOCKS, PredictedPlacements

# Chains that share their first blocks and are told apart by every hash after those.
chains = st.integers(0, 70).map(
    lambda shared: [*range(shared), *(1000 * shared + i for i in range(shared, 70))]
)


def depth_of(placements: PredictedPlacements, worker: int, chain: list[int], now: float) -> int:
    return next((depth for depth, workers in placements.levels(chain, now) if workers >> worker & 1), 0)


@given(st.lists(st.tuples(st.integers(0, 3), chains), max_size=6), chains)
def test_never_more_than_is_shared_and_at_most_a_stride_less(
    placed: list[tuple[int, list[int]]], wanted: list[int]
) -> None:
    placements = PredictedPlacements(ttl_s=10)
    for worker, chain in placed:
        placements.add(worker, chain, now=1.0)
    for worker in range(4):
        shared = max((common_prefix(chain, wanted) for w, chain in placed if w == worker), default=0)
        found = depth_of(placements, worker, wanted, now=1.0)
        assert found <= shared
        assert found > shared - ANCHOR_STRIDE_BLOCKS


def common_prefix(one: list[int], other: list[int]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def test_believed_for_one_to_two_lifetimes() -> None:
    placements = PredictedPlacements(ttl_s=10)
    placements.add(0, list(range(16)), now=100.0)
    assert depth_of(placements, 0, list(range(16)), now=109.9) == 16
    assert depth_of(placements, 0, list(range(16)), now=111.0) == 16
    assert depth_of(placements, 0, list(range(16)), now=121.1) == 0
    placements.add(0, list(range(16)), now=200.0)
    assert depth_of(placements, 0, list(range(16)), now=1000.0) == 0


def test_a_worker_that_is_gone_is_forgotten() -> None:
    placements = PredictedPlacements(ttl_s=10)
    placements.add(0, list(range(16)), now=0.0)
    placements.add(1, list(range(16)), now=0.0)
    placements.forget(0)
    assert placements.levels(list(range(16)), 0.0) == [(16, 0b10)]


def test_memory_is_bounded() -> None:
    placements = PredictedPlacements(ttl_s=1e9, max_anchors=100)
    for number in range(1000):
        placements.add(0, [number * 100 + i for i in range(64)], now=0.0)
    assert placements.num_anchors <= 2 * (100 + 64)
    assert depth_of(placements, 0, [999 * 100 + i for i in range(64)], 0.0) == 64
