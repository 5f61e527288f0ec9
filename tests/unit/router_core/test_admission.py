from __future__ import annotations

import msgspec
import pytest

from router.core.admission import ADMISSIONS, make_admission
from router.core.decision import Choice, Rejection, RejectReason
from router.core.estimator import DecodeModel
from router.core.settings import Settings
from router.core.view import ClusterView, InstanceState, RequestView

MODEL = DecodeModel(constant_ms=10.0, per_request_ms=1.0, per_kv_token_ms=0.001)
REQUEST = RequestView("r", prompt_tokens=1000)
FAST, SLOW = (Choice(InstanceState("x"), "test", predicted_ms=ms) for ms in (50.0, 5000.0))
NO_ROOM = Choice(InstanceState("x"), "test", predicted_ms=50.0, short_of_kv_tokens=7)
LIMITS = {"ttft_slo_ms": 1000.0, "tbt_slo_ms": 100.0}


class KnownForecast(msgspec.Struct):
    """20 requests of 1,000 tokens until second 5, none after; request-level: 10 until 5, then 40."""

    mean_decode_ms: float = 4000.0
    asked: list[tuple[float, float]] = []

    def uniform_load_at(self, at: float, decode_ms: float) -> tuple[float, float]:
        self.asked.append((at, decode_ms))
        return (20, 20_000) if at < 5 else (0, 0)

    def expected_load_at(self, at: float, now: float) -> tuple[float, float]:
        self.asked.append((at, now))
        return (10, 10_000) if at < 5 else (40, 40_000)


def view(*decode: InstanceState) -> ClusterView:
    return ClusterView(decode=decode or (InstanceState("d0", running_requests=2),), forecast=KnownForecast())


def arrival(
    name: str,
    prefill: Choice,
    decode: Choice,
    request: RequestView = REQUEST,
    cluster: ClusterView | None = None,
    now: float = 0.0,
    **fields: float,
) -> Rejection | None:
    settings = Settings(admission=name, decode_model=MODEL, **{**LIMITS, **fields})  # type: ignore[arg-type]
    return make_admission(settings).at_arrival(request, prefill, decode, cluster or view(), now)


def reason(rejection: Rejection | None) -> RejectReason | None:
    return rejection.reason if rejection is not None else None


@pytest.mark.parametrize("name", sorted(ADMISSIONS))
class TestEveryAdmission:
    def test_without_slos_nothing_is_refused(self, name: str) -> None:
        assert arrival(name, SLOW, SLOW, ttft_slo_ms=0, tbt_slo_ms=0) is None
        settings = Settings(admission=name)
        assert make_admission(settings).after_prefill(REQUEST, SLOW, view(), 0.0) is None

    def test_within_the_slos_nothing_is_refused(self, name: str) -> None:
        assert arrival(name, FAST, FAST) is None


@pytest.mark.parametrize("name", sorted(set(ADMISSIONS) - {"none"}))
class TestEveryAdmissionThatRefuses:
    def test_ttft_beyond_its_slo(self, name: str) -> None:
        rejection = arrival(name, SLOW, FAST)
        assert rejection == Rejection(RejectReason.TTFT_SLO, 4000.0, 5000.0, 1000.0)

    def test_the_requests_own_slo_goes_before_the_clusters(self, name: str) -> None:
        assert arrival(name, SLOW, FAST, RequestView("r", ttft_slo_ms=6000.0), ClusterView()) is None
        assert reason(arrival(name, FAST, FAST, RequestView("r", ttft_slo_ms=40.0))) is RejectReason.TTFT_SLO

    def test_less_urgent_requests_are_refused_first(self, name: str) -> None:
        at_90_percent = Choice(InstanceState("x"), "test", predicted_ms=900.0)
        assert arrival(name, at_90_percent, FAST) is None
        assert arrival(name, at_90_percent, FAST, RequestView("r", priority=-1)) is None
        low = arrival(name, at_90_percent, FAST, RequestView("r", priority=1))
        assert low is not None and low.limit == 800.0

    def test_retry_after_is_never_below_a_second(self, name: str) -> None:
        just_over = Choice(InstanceState("x"), "test", predicted_ms=1001.0)
        rejection = arrival(name, just_over, FAST)
        assert rejection is not None and rejection.retry_after_ms == 1000.0


def test_none_admits_everything() -> None:
    assert arrival("none", SLOW, NO_ROOM) is None


def test_baseline_sees_decode_only_after_the_prefill() -> None:
    settings = Settings(admission="baseline", **LIMITS)  # type: ignore[arg-type]
    assert arrival("baseline", FAST, SLOW) is None
    assert arrival("baseline", FAST, NO_ROOM) is None
    late = make_admission(settings).after_prefill(REQUEST, SLOW, view(), 0.0)
    assert late == Rejection(RejectReason.TBT_SLO, 2000.0, 5000.0, 100.0)
    assert (
        reason(make_admission(settings).after_prefill(REQUEST, NO_ROOM, view(), 0.0)) is RejectReason.KV_ROOM
    )
    assert make_admission(settings).after_prefill(REQUEST, FAST, view(), 0.0) is None


@pytest.mark.parametrize("name", ["early", "predictive", "predictive_request"])
def test_only_baseline_wastes_prefills(name: str) -> None:
    settings = Settings(admission=name, **LIMITS)  # type: ignore[arg-type]
    assert make_admission(settings).after_prefill(REQUEST, SLOW, view(), 0.0) is None


def test_early_judges_decode_as_it_is_now() -> None:
    assert arrival("early", FAST, SLOW) == Rejection(RejectReason.TBT_SLO, 2000.0, 5000.0, 100.0)
    assert reason(arrival("early", FAST, NO_ROOM)) is RejectReason.KV_ROOM


def test_predictive_judges_decode_as_it_will_be() -> None:
    # 21 requests and 21,000 KV tokens on one instance: 10 + 21 + 21 = 52 ms.
    assert arrival("predictive", FAST, SLOW) is None
    refused = arrival("predictive", FAST, SLOW, tbt_slo_ms=50.0)
    assert refused == Rejection(RejectReason.DECODE_LOAD, 2000.0, 52.0, 50.0)
    # On two instances: 10 + 10.5 + 10.5.
    assert (
        arrival(
            "predictive", FAST, SLOW, cluster=view(InstanceState("d0"), InstanceState("d1")), tbt_slo_ms=50.0
        )
        is None
    )
    # When the prefill is done at second 5 they are gone.
    slow_but_allowed = Choice(InstanceState("x"), "test", predicted_ms=5000.0)
    assert arrival("predictive", slow_but_allowed, SLOW, tbt_slo_ms=50.0, ttft_slo_ms=9000.0) is None


def test_predictive_asks_for_the_end_of_this_prefill_with_the_configured_or_measured_t_d() -> None:
    for decode_ms, expected in ((0.0, 4000.0), (700.0, 700.0)):
        forecast = KnownForecast(asked=[])
        cluster = ClusterView(decode=(InstanceState("d0"),), forecast=forecast)
        arrival("predictive", FAST, FAST, cluster=cluster, now=2.0, decode_ms=decode_ms)
        assert forecast.asked == [(2.05, expected)]


def test_predictive_counts_slow_instances() -> None:
    slow = view(InstanceState("d0", tbt_scale=2.0))
    refused = arrival("predictive", FAST, FAST, cluster=slow)
    assert refused is not None and refused.predicted == pytest.approx(104.0)


def test_predictive_counts_kv_room_where_capacities_are_known() -> None:
    tight = view(InstanceState("d0", kv_capacity_tokens=20_500))
    refused = arrival("predictive", FAST, FAST, cluster=tight)
    assert refused is not None and (refused.reason, refused.predicted) == (RejectReason.KV_ROOM, 500)
    partly_known = view(InstanceState("d0", kv_capacity_tokens=20_500), InstanceState("d1"))
    assert arrival("predictive", FAST, FAST, cluster=partly_known) is None


def test_predictive_without_a_forecast_is_about_ttft_only() -> None:
    cluster = ClusterView(decode=(InstanceState("d0"),))
    assert arrival("predictive", FAST, SLOW, cluster=cluster) is None
    assert reason(arrival("predictive", SLOW, SLOW, cluster=cluster)) is RejectReason.TTFT_SLO


def test_request_level_prediction_uses_each_requests_own_end() -> None:
    # 11 requests now: 10 + 11 + 11 = 32; 41 at second 5: 92.
    assert arrival("predictive_request", FAST, SLOW, tbt_slo_ms=50.0) is None
    later = Choice(InstanceState("x"), "test", predicted_ms=5000.0)
    refused = arrival("predictive_request", later, SLOW, tbt_slo_ms=50.0, ttft_slo_ms=9000.0)
    assert refused is not None and (refused.reason, refused.predicted) == (RejectReason.DECODE_LOAD, 92.0)
