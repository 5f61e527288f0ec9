"""The scheduler puts policies and admission together."""

import msgspec
import pytest

from kvcore.errors import ConfigError
from router.core.decision import RejectReason
from router.core.policies import make_policy
from router.core.scheduler import Scheduler
from router.core.settings import Settings
from router.core.view import ClusterView, InstanceState, RequestView

REQUEST = RequestView("r", prompt_tokens=1000)
P = (InstanceState("p0"), InstanceState("p1"))
D = (InstanceState("d0"), InstanceState("d1"))


def scheduler(prefill: str = "round_robin", decode: str = "round_robin", **fields: object) -> Scheduler:
    settings = Settings(**fields)  # type: ignore[arg-type]
    return Scheduler(make_policy(prefill, settings), make_policy(decode, settings), settings)


def test_prefill_and_decode_are_chosen_each_by_its_policy() -> None:
    decision = scheduler("round_robin", "least_loaded").schedule(
        REQUEST, ClusterView(prefill=P, decode=D), 0.0
    )
    assert (decision.prefill, decision.decode, decision.reject) == (P[0], D[0], None)
    assert decision.reasons == ("round_robin", "least_loaded")
    assert [c.instance_id for c in decision.candidates] == ["d0", "d1"]


def test_every_decision_predicts_whatever_the_policy() -> None:
    settings = Settings()
    decision = scheduler().schedule(REQUEST, ClusterView(prefill=P, decode=D), 0.0)
    assert decision.ttft_ms == pytest.approx(settings.prefill_model.compute_ms(1000, 0))
    assert decision.tbt_ms == pytest.approx(settings.decode_model.tbt_ms(1, 1000))
    assert decision.prefill_choice is not None
    assert decision.prefill_choice.compute_ms == decision.ttft_ms


def test_one_instance_does_both_in_a_mixed_pool() -> None:
    decision = scheduler().schedule(REQUEST, ClusterView(mixed=P), 0.0)
    assert (decision.prefill, decision.decode) == (None, P[0])
    assert decision.ttft_ms > 0 and decision.tbt_ms > 0


def test_without_prefill_instances_decode_does_both() -> None:
    decision = scheduler().schedule(REQUEST, ClusterView(decode=D), 0.0)
    assert (decision.prefill, decision.decode, decision.reject) == (None, D[0], None)
    assert decision.reasons[0] == "no_prefill_instance"


@pytest.mark.parametrize("view", [ClusterView(), ClusterView(prefill=P)])
def test_nobody_to_answer_is_a_rejection(view: ClusterView) -> None:
    decision = scheduler().schedule(REQUEST, view, 0.0)
    assert decision.reject is not None
    assert decision.reject.reason is RejectReason.NO_INSTANCE
    assert "decode instance" in decision.reject.detail


def test_excluded_instances_are_not_chosen() -> None:
    tried = RequestView("r", excluded=frozenset({"p0", "d0"}))
    view = ClusterView(prefill=P, decode=D)
    for _ in range(3):
        decision = scheduler().schedule(tried, view, 0.0)
        assert (decision.prefill, decision.decode) == (P[1], D[1])
    assert scheduler().choose_decode(tried, view, 0.0).instance is D[1]
    assert scheduler().choose_prefill(tried, view, 0.0).instance is P[1]
    all_tried = RequestView("r", excluded=frozenset({"p0", "p1", "d0", "d1"}))
    rejection = scheduler().schedule(all_tried, view, 0.0).reject
    assert rejection is not None and rejection.detail == "every instance was tried"


def test_a_rejected_request_still_tells_where_it_would_have_gone() -> None:
    decision = scheduler("global_cache_aware", "least_tbt", admission="early", ttft_slo_ms=1.0).schedule(
        REQUEST, ClusterView(prefill=P, decode=D), 0.0
    )
    assert decision.reject is not None and decision.reject.reason is RejectReason.TTFT_SLO
    assert decision.transfer is None
    assert decision.reasons == ("least_ttft", "least_tbt", "reject:ttft_slo")
    assert len(decision.candidates) == 4


def test_baseline_looks_at_decode_after_the_prefill() -> None:
    busy = (
        InstanceState(
            "d0",
            running_requests=100,
            kv_used_tokens=400_000,
            decoding_requests=100,
            decoding_kv_tokens=400_000.0,
        ),
    )
    view = ClusterView(prefill=P, decode=busy)
    baseline = scheduler(admission="baseline", tbt_slo_ms=20.0)
    assert baseline.schedule(REQUEST, view, 0.0).reject is None
    refused = baseline.after_prefill(REQUEST, busy[0], view, 0.0)
    assert refused is not None and refused.reason is RejectReason.TBT_SLO
    early = scheduler(admission="early", tbt_slo_ms=20.0)
    assert early.schedule(REQUEST, view, 0.0).reject is not None
    assert early.after_prefill(REQUEST, busy[0], view, 0.0) is None


def test_after_the_prefill_those_that_wait_for_theirs_do_not_count() -> None:
    promised = (InstanceState("d0", running_requests=100, kv_used_tokens=400_000),)
    view = ClusterView(prefill=P, decode=promised)
    baseline = scheduler(admission="baseline", tbt_slo_ms=20.0)
    assert baseline.after_prefill(REQUEST, promised[0], view, 0.0) is None


def test_an_unknown_admission_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="no admission policy 'strict'; there are: baseline, early"):
        scheduler(admission="strict")


@pytest.mark.parametrize(("waited_ms", "held_ms"), [(0.0, 30.0), (69.0, 30.0), (70.0, 0.0)])
def test_who_is_refused_for_load_is_held_while_its_ttft_can_be_kept(waited_ms: float, held_ms: float) -> None:
    busy = (InstanceState("p0", prefill_free_at=9.0),)
    request = msgspec.structs.replace(REQUEST, waited_ms=waited_ms)
    core = scheduler(admission="early", ttft_slo_ms=100.0, hold_ms=30.0)
    decision = core.schedule(request, ClusterView(prefill=busy, decode=D), 0.0)
    assert decision.reject is not None and decision.hold_ms == held_ms
    assert decision.reasons[-1] == ("hold:ttft_slo" if held_ms else "reject:ttft_slo")


def test_nobody_is_held_for_instances_that_are_not_there() -> None:
    decision = scheduler(ttft_slo_ms=100.0, hold_ms=30.0).schedule(REQUEST, ClusterView(), 0.0)
    assert decision.reject is not None and decision.hold_ms == 0.0
