"""Rates and quantiles between snapshots, and what a page that already has some rows gets."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.dashboard.history import KEPT_SAMPLES, Bounds, History, Snapshot, between, quantile_ms

BOUNDS = Bounds((0.1, 0.2, 0.5), (0.01, 0.02))


def snapshot(at: float, **counters: Any) -> Snapshot:
    return Snapshot(at=at, unix_time_s=1000.0 + at, **counters)


def test_figures_are_what_happened_between_two_snapshots() -> None:
    old = snapshot(
        10.0,
        finished=100,
        failed=1,
        rejected={"ttft_slo": 5},
        ttft_counts=(1, 0, 0, 0),
        tbt_counts=(0, 0, 0),
        prompt_tokens=1000,
        hit_tokens=500,
        slo_answers={("ttft", "met"): 7},
    )
    new = snapshot(
        14.0,
        finished=140,
        failed=3,
        rejected={"ttft_slo": 7, "kv_room": 4},
        ttft_counts=(1, 4, 0, 0),
        tbt_counts=(0, 0, 2),
        prompt_tokens=1200,
        hit_tokens=550,
        slo_answers={("ttft", "met"): 10, ("ttft", "missed"): 1},
    )
    figures = between(old, new, BOUNDS)
    assert (figures.seconds, figures.finished, figures.failed) == (4.0, 40, 2)
    assert figures.rejected == {"ttft_slo": 2, "kv_room": 4}
    assert figures.ttft_p50_ms == pytest.approx(150.0) and figures.ttft_p95_ms == pytest.approx(195.0)
    assert figures.tbt_p50_ms == figures.tbt_p95_ms == 20.0  # beyond the last bound nothing is known
    assert figures.hit_share == 0.25
    assert (figures.ttft_met_share, figures.tbt_met_share) == (0.75, None)


def test_silence_has_no_latencies() -> None:
    figures = between(snapshot(0.0), snapshot(2.0), BOUNDS)
    assert (figures.finished, figures.ttft_p50_ms, figures.hit_share) == (0, None, None)


@given(st.lists(st.floats(0.0, 0.5), min_size=1, max_size=80), st.sampled_from([0.5, 0.95, 1.0]))
def test_a_quantile_lies_in_the_bucket_of_the_true_one(values: list[float], quantile: float) -> None:
    bounds = BOUNDS.ttft
    counts = [0] * (len(bounds) + 1)
    for value in values:
        counts[next(i for i, bound in enumerate(bounds) if value <= bound)] += 1
    true = sorted(values)[max(0, -int(-quantile * len(values) // 1) - 1)]
    found = quantile_ms(bounds, counts, quantile)
    assert found is not None
    bucket = next(i for i, bound in enumerate(bounds) if true <= bound)
    lower = bounds[bucket - 1] if bucket else 0.0
    assert lower * 1e3 - 1e-6 <= found <= bounds[bucket] * 1e3 + 1e-6


def test_a_page_gets_the_rows_it_does_not_have() -> None:
    history = History(BOUNDS)
    assert history.columns_after(0)["unix_time_s"] == [] and history.recent() is None
    for number in range(6):
        history.add(snapshot(2.0 * number, finished=10 * number))
    assert history.num_rows == 5  # between six snapshots
    assert history.columns_after(0)["requests_per_s"] == [5.0] * 5
    assert history.columns_after(3)["unix_time_s"] == [1008.0, 1010.0]
    assert history.columns_after(5)["unix_time_s"] == []
    assert len(history.columns_after(999)["unix_time_s"]) == 5  # the page knew the router before a restart


def test_half_an_hour_is_kept_and_the_last_minute_is_summed() -> None:
    history = History(BOUNDS)
    for number in range(KEPT_SAMPLES + 50):
        history.add(snapshot(2.0 * number, finished=number * number))
    columns = history.columns_after(0)
    assert {len(column) for column in columns.values()} == {KEPT_SAMPLES}
    recent, last = history.recent(), KEPT_SAMPLES + 49
    assert recent is not None
    assert (recent.seconds, recent.finished) == (60.0, last**2 - (last - 30) ** 2)


def test_each_reason_of_a_rejection_is_a_column() -> None:
    history = History(BOUNDS)
    history.add(snapshot(0.0))
    history.add(snapshot(2.0, rejected={"kv_room": 2}))
    history.add(snapshot(4.0, rejected={"kv_room": 2, "tbt_slo": 4}))
    columns = history.columns_after(0)
    assert (columns["rejected:kv_room"], columns["rejected:tbt_slo"]) == ([1.0, 0.0], [0.0, 2.0])
