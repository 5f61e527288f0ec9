"""Policy elastic: decode instances prefill as well, while their steps keep the TBT SLO."""

import msgspec
import pytest

from router.core.decision import Decision
from router.core.estimator import DecodeModel, PrefillModel
from router.core.policies import make_policy
from router.core.scheduler import Scheduler
from router.core.settings import Settings
from router.core.view import ClusterView, InstanceState, RequestView

# A chunk of 100 tokens takes 10 ms; a step 20 ms and 1 ms for each request: room beside 70 of them.
SETTINGS = Settings(
    tbt_slo_ms=100.0,
    decode_chunk_tokens=100,
    expected_output_tokens=0,
    prefill_model=PrefillModel(0.0, 0.1, 0.0),
    decode_model=DecodeModel(20.0, 1.0, 0.0),
)
REQUEST = RequestView("r", prompt_tokens=1000)
BUSY = (InstanceState("p0", prefill_free_at=9.0), InstanceState("p1", prefill_free_at=5.0))


def decide(
    *decode: InstanceState,
    prefill: tuple[InstanceState, ...] = BUSY,
    settings: Settings = SETTINGS,
    request: RequestView = REQUEST,
) -> Decision:
    scheduler = Scheduler(make_policy("elastic", settings), make_policy("least_tbt", settings), settings)
    return scheduler.schedule(request, ClusterView(prefill=prefill, decode=decode), 0.0)


def test_a_decode_instance_with_time_to_spare_does_both_legs() -> None:
    spare = InstanceState("d1", running_requests=70)
    decision = decide(InstanceState("d0", running_requests=71), spare)
    assert (decision.prefill, decision.decode) == (None, spare)
    assert decision.reasons == ("least_ttft", "same_instance")
    assert decision.ttft_ms == pytest.approx(100.0)


def test_none_has_time_so_a_prefill_instance_computes() -> None:
    decision = decide(InstanceState("d0", running_requests=71))
    assert decision.prefill is BUSY[1] and decision.decode is not None


def test_no_batch_is_disturbed_while_prefill_instances_keep_up() -> None:
    idle = (InstanceState("p0", prefill_free_at=0.1),)
    assert decide(InstanceState("d0"), prefill=idle).prefill is idle[0]


@pytest.mark.parametrize(
    "helper",
    [
        InstanceState("d0", kv_used_tokens=500, kv_capacity_tokens=1400),
        InstanceState("d0", prefill_free_at=20.0),
    ],
    ids=["no room", "longer queue"],
)
def test_an_instance_that_cannot_help_is_left_alone(helper: InstanceState) -> None:
    assert decide(helper).prefill is BUSY[1]


def test_without_a_chunk_size_it_is_algorithm_1() -> None:
    settings = msgspec.structs.replace(SETTINGS, decode_chunk_tokens=0)
    assert decide(InstanceState("d0"), settings=settings).prefill is BUSY[1]


def test_an_instance_tried_already_is_not_asked_again() -> None:
    tried = msgspec.structs.replace(REQUEST, excluded=frozenset({"d0"}))
    assert decide(InstanceState("d0"), InstanceState("d1"), request=tried).decode == InstanceState("d1")
