from hypothesis import given
from hypothesis import strategies as st

from router.core.placement import PredictedPlacements

# Chains that share their first blocks and are told apart by every hash after those.
chains = st.integers(0, 70).map(
    lambda shared: [*range(shared), *(1000 * shared + i for i in range(shared, 70))]
)


def depth_of(placements: PredictedPlacements, worker: int, chain: list[int], now: float) -> int:
    return next((depth for depth, workers in placements.levels(chain, now) if workers >> worker & 1), 0)


@given(st.lists(st.tuples(st.integers(0, 3), chains), max_size=6), chains)
def test_never_more_than_is_shared_and_exactly_that_for_the_latest(
    placed: list[tuple[int, list[int]]], wanted: list[int]
) -> None:
    placements = PredictedPlacements(ttl_s=10)
    for worker, chain in placed:
        placements.add(worker, chain, now=1.0, expected_at=1.0)
    for worker in range(4):
        shared = [common_prefix(chain, wanted) for w, chain in placed if w == worker]
        found = depth_of(placements, worker, wanted, now=1.0)
        assert max(shared, default=0) >= found >= (shared[-1] if shared else 0)


def common_prefix(one: list[int], other: list[int]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


CHAIN = list(range(20))


def test_believed_until_its_expected_time_and_a_lifetime() -> None:
    placements = PredictedPlacements(ttl_s=10)
    placements.add(0, CHAIN, now=100.0, expected_at=160.0)
    assert depth_of(placements, 0, CHAIN, now=169.9) == 20
    assert depth_of(placements, 0, CHAIN, now=170.0) == 0
    assert len(placements) == 0


def test_once_settled_events_have_a_moment_to_come() -> None:
    placements = PredictedPlacements(ttl_s=10, settled_ttl_s=1.0)
    placement = placements.add(0, CHAIN, now=100.0, expected_at=160.0)
    placements.settle(placement, now=110.0)
    assert depth_of(placements, 0, CHAIN, now=110.9) == 20
    assert depth_of(placements, 0, CHAIN, now=111.0) == 0
    assert depth_of(placements, 0, CHAIN, now=500.0) == 0
    assert len(placements) == 0


def test_a_withdrawn_placement_leaves_the_others() -> None:
    placements = PredictedPlacements(ttl_s=10)
    failed = placements.add(0, CHAIN, now=0.0, expected_at=0.0)
    placements.add(1, CHAIN[:6], now=0.0, expected_at=0.0)
    placements.withdraw(failed)
    placements.withdraw(failed)
    assert placements.levels(CHAIN, 0.0) == [(6, 0b10)]


def test_a_later_placement_survives_the_end_of_an_earlier_one() -> None:
    placements = PredictedPlacements(ttl_s=10)
    early = placements.add(0, CHAIN, now=0.0, expected_at=0.0)
    placements.add(0, CHAIN[:12], now=0.0, expected_at=50.0)
    placements.settle(early, now=1.0)
    assert depth_of(placements, 0, CHAIN, now=30.0) == 12


def test_a_worker_that_is_gone_is_forgotten() -> None:
    placements = PredictedPlacements(ttl_s=10)
    placements.add(0, CHAIN, now=0.0, expected_at=0.0)
    placements.add(1, CHAIN, now=0.0, expected_at=0.0)
    placements.forget(0)
    assert placements.levels(CHAIN, 0.0) == [(20, 0b10)]


def test_short_and_empty_prompts() -> None:
    placements = PredictedPlacements(ttl_s=10)
    placements.add(0, [], now=0.0, expected_at=0.0)
    placements.add(0, [7], now=0.0, expected_at=0.0)
    assert placements.levels([], 0.0) == []
    assert placements.levels([7], 0.0) == [(1, 1)]
    assert placements.levels([8], 0.0) == []


def test_memory_is_bounded() -> None:
    placements = PredictedPlacements(ttl_s=1e9, max_placements=100)
    for number in range(1000):
        placements.add(0, [number * 100 + i for i in range(64)], now=0.0, expected_at=float(number))
    assert len(placements) == 100
    assert depth_of(placements, 0, [999 * 100 + i for i in range(64)], 0.0) == 64
    assert depth_of(placements, 0, list(range(64)), 0.0) == 0


def test_blocks_kept_are_bounded_whatever_the_length_of_prompts() -> None:
    placements = PredictedPlacements(ttl_s=10, max_blocks=100)
    chains = [list(range(1000 * n, 1000 * n + 20)) for n in range(1, 51)]
    for at, chain in enumerate(chains):
        placements.add(0, chain, now=0.0, expected_at=float(at))
    assert [chain for chain in chains if depth_of(placements, 0, chain, now=0.0)] == chains[-5:]
    placements.withdraw(placements.add(0, list(range(90)), now=0.0, expected_at=100.0))
    placements.add(0, CHAIN, now=0.0, expected_at=200.0)
    assert depth_of(placements, 0, CHAIN, now=0.0) == 20
    placements.add(0, list(range(5000, 5101)), now=0.0, expected_at=300.0)
    assert depth_of(placements, 0, list(range(5000, 5101)), now=0.0) == 0
