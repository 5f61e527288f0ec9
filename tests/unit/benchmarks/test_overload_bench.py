"""The overload benchmark's own arithmetic: what a cluster can take, and what a turn is summed up to."""

import pytest
from msgspec.structs import replace
from overloadbench.client import Answer
from overloadbench.plan import Models, Plan, Setup, requests
from overloadbench.runner import Counted, added, quantile, summed_up

from router.core.estimator import DecodeModel, PrefillModel

MODELS = Models(
    PrefillModel(constant_ms=0.0, per_token_ms=0.1, per_token2_ms=0.0),
    DecodeModel(constant_ms=10.0, per_request_ms=1.0, per_kv_token_ms=0.0),
)
SETUP = Setup(models=MODELS, tbt_slo_ms=20.0, router_share=1.0, warm_up_s=5.0, expected_output_tokens=100)
PLAN = Plan(setup=SETUP, prompt_tokens=1000, seconds=20.0)


def test_capacity_is_that_of_the_slower_side() -> None:
    assert PLAN.prefill_per_s == pytest.approx(2 * 10)  # 100 ms a prompt
    assert PLAN.decode_per_s == pytest.approx(10 / 2)  # ten streams, two seconds each
    assert PLAN.capacity_per_s == PLAN.decode_per_s
    assert replace(PLAN, setup=replace(SETUP, num_decode=8)).capacity_per_s == PLAN.prefill_per_s


def test_no_capacity_where_one_stream_alone_misses_its_slo() -> None:
    assert replace(PLAN, setup=replace(SETUP, tbt_slo_ms=9.0)).capacity_per_s == 0.0


def test_requests_are_the_same_for_every_policy_and_others_in_the_next_round() -> None:
    first, again, other = (list(requests(PLAN, number)) for number in (0, 0, 1))
    assert first == again != other
    assert len(first) == pytest.approx(PLAN.load * PLAN.capacity_per_s * PLAN.seconds, rel=0.3)
    assert all(500 <= len(request.prompt) <= 1500 and request.output_tokens >= 2 for request in first)
    assert [request.at_s for request in first] == sorted(request.at_s for request in first)


def test_a_turn_counts_what_came_after_the_warm_up_and_every_failure() -> None:
    answers = [
        Answer(1.0, failed="cut"),
        Answer(2.0, refused="ttft_slo"),
        Answer(6.0, 100.0, 12.0, tokens=1100),
        Answer(7.0, 9000.0, 12.0, tokens=900),
        Answer(8.0, refused="tbt_slo"),
    ]
    one = summed_up(SETUP, "early", 0, answers, Counted(3, 1000, 250))
    assert (one.offered, one.answered, one.met_slo, one.num_refused) == (3, 2, 1, 1)
    assert one.refused == {"tbt_slo": 1}
    assert (one.prefilled_in_vain, one.cached_share, one.good_tokens) == (3, 0.25, 1100)
    assert one.failures == ["cut"]
    both = added([one, replace(one, ttft_p50_ms=one.ttft_p50_ms + 10)])
    assert (both.round, both.offered, both.prefilled_in_vain) == (2, 6, 6)
    assert (both.good_tokens, both.cached_share) == (2200, 0.25)
    assert both.refused == {"tbt_slo": 2}
    assert both.ttft_p50_ms == one.ttft_p50_ms + 5


def test_quantiles() -> None:
    assert quantile([], 0.9) == 0.0
    assert quantile([1.0], 0.9) == 1.0
    assert quantile([float(value) for value in range(10)], 0.5) == 5.0
