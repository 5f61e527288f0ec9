"""All parts together under a virtual clock: what the paper found must come out in the same order."""

from __future__ import annotations

import pytest

from router.core.settings import Settings
from tests.unit.router_core.small_world import SmallWorld, skewed_arrivals

TTFT_SLO_MS, TBT_SLO_MS = 4000.0, 14.0


def mean_ttft_ms(policy: str) -> float:
    world = SmallWorld(policy, Settings(seed=1))
    world.run(skewed_arrivals(1000, per_second=25, documents=40, document_blocks=32, seed=3))
    assert len(world.ttfts_ms) == 1000
    assert (world.book.num_requests, len(world.book.forecast)) == (0, 0)
    assert (world.num_transfers > 0) == (policy == "global_cache_aware")
    world.index.table.check()
    return sum(world.ttfts_ms) / 1000


def test_ttft_in_the_order_of_figure_5() -> None:
    by_policy = {
        policy: mean_ttft_ms(policy)
        for policy in ("global_cache_aware", "cache_aware", "least_loaded", "random")
    }
    assert sorted(by_policy, key=by_policy.__getitem__) == list(by_policy)
    assert by_policy["global_cache_aware"] < 0.9 * by_policy["cache_aware"]


def overload(admission: str, tbt_slo_ms: float, output_tokens: tuple[int, ...] = (300,)) -> SmallWorld:
    """Prefill keeps up, decode does not."""
    settings = Settings(seed=1, admission=admission, ttft_slo_ms=TTFT_SLO_MS, tbt_slo_ms=tbt_slo_ms)
    lengths = lambda number: output_tokens[number % len(output_tokens)]  # noqa: E731
    world = SmallWorld("global_cache_aware", settings, num_decode=3, output_tokens=lengths)
    world.run(skewed_arrivals(1500, per_second=20, documents=400, document_blocks=16, seed=3))
    assert world.book.num_requests == 0
    assert max(world.ttfts_ms) <= TTFT_SLO_MS
    return world


def test_prediction_refuses_fewest_and_only_the_baseline_prefills_in_vain() -> None:
    """Not that `early` refuses fewer than the baseline: prefill has time to waste here. A trace in which now
    the one and now the other side is short of it shows that (kvsim.paper.overload)."""
    worlds = {name: overload(name, TBT_SLO_MS) for name in ("baseline", "early", "predictive")}
    assert worlds["predictive"].num_rejected < min(
        worlds["early"].num_rejected, worlds["baseline"].num_rejected
    )
    assert worlds["baseline"].num_wasted_prefills > 100
    assert worlds["early"].num_wasted_prefills == worlds["predictive"].num_wasted_prefills == 0
    # A prediction of averages works at the limit: some instances are a little over it, none much.
    for world in worlds.values():
        assert max(world.tbts_ms) < 1.1 * TBT_SLO_MS
    assert max(overload("none", TBT_SLO_MS).tbts_ms) > 1.25 * TBT_SLO_MS


def test_request_level_prediction_sees_two_kinds_of_requests_where_a_uniform_t_d_does_not() -> None:
    slo_ms = 16.0
    uniform = overload("predictive", slo_ms, (900, 30, 30))
    by_request = overload("predictive_request", slo_ms, (900, 30, 30))
    early = overload("early", slo_ms, (900, 30, 30))

    def share_violated(world: SmallWorld) -> float:
        return sum(tbt_ms > 1.1 * slo_ms for tbt_ms in world.tbts_ms) / len(world.tbts_ms)

    assert share_violated(uniform) > 0.3
    assert share_violated(by_request) < 0.02
    assert by_request.num_rejected < early.num_rejected


@pytest.mark.parametrize("policy", ["global_cache_aware", "random"])
def test_the_same_arrivals_give_the_same_run(policy: str) -> None:
    runs = []
    for _ in range(2):
        world = SmallWorld(policy, Settings(seed=5))
        world.run(skewed_arrivals(200, per_second=25, documents=40, document_blocks=8, seed=9))
        runs.append(world.ttfts_ms)
    assert runs[0] == runs[1]
