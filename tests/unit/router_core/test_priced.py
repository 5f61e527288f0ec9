"""Priced admission, on cases worked out by hand: TTFT SLO 1,000 ms, exponent 2."""

import pytest

from kvcore.wire.events import BlockStored
from router.core.admission import make_admission
from router.core.admission.base import Admission
from router.core.block_hash import block_hashes
from router.core.decision import Choice, Rejection, RejectReason
from router.core.estimator import DecodeModel, PrefillModel
from router.core.prefix_index import PrefixIndex
from router.core.settings import Settings
from router.core.view import ClusterView, InstanceState, RequestView

INSTANCE = InstanceState("x")
SETTINGS = Settings(
    admission="priced",
    ttft_slo_ms=1000.0,
    tbt_slo_ms=100.0,
    price_exponent=2.0,
    prefill_model=PrefillModel(0.0, 1.0, 0.0),
    decode_model=DecodeModel(10.0, 1.0, 0.001),
)


class Forecast:
    mean_decode_ms = 4000.0

    def __init__(self, requests: float, kv_tokens: float) -> None:
        self._load = requests, kv_tokens

    def uniform_load_at(self, at: float, decode_ms: float) -> tuple[float, float]:
        return self._load

    def expected_load_at(self, at: float, now: float) -> tuple[float, float]:
        return self._load


def choice(waiting_ms: float, compute_ms: float, prefix_blocks: int = 0) -> Choice:
    return Choice(
        INSTANCE,
        "test",
        predicted_ms=waiting_ms + compute_ms,
        compute_ms=compute_ms,
        prefix_blocks=prefix_blocks,
    )


def ask(
    waiting_ms: float,
    compute_ms: float,
    request: RequestView | None = None,
    view: ClusterView | None = None,
    admission: Admission | None = None,
    prefix_blocks: int = 0,
) -> Rejection | None:
    request = request or RequestView("r", prompt_tokens=100)
    prefill = choice(waiting_ms, compute_ms, prefix_blocks)
    admission = admission or make_admission(SETTINGS)
    return admission.at_arrival(request, prefill, choice(0, 0), view or ClusterView(), 0.0)


def test_an_idle_cluster_admits_whatever_fits() -> None:
    assert ask(0.0, 1000.0) is None
    rejection = ask(0.0, 1000.1)
    assert rejection is not None and rejection.reason is RejectReason.TTFT_SLO


@pytest.mark.parametrize(("waiting_ms", "affordable_ms"), [(200, 640.0), (500, 250.0), (800, 40.0)])
def test_the_longer_the_queue_the_less_a_prefill_may_cost(waiting_ms: float, affordable_ms: float) -> None:
    assert ask(waiting_ms, affordable_ms - 0.01) is None
    rejection = ask(waiting_ms, affordable_ms + 0.01)
    assert rejection is not None
    assert rejection.reason in (RejectReason.PREFILL_PRICE, RejectReason.TTFT_SLO)
    if rejection.reason is RejectReason.PREFILL_PRICE:
        assert rejection.limit == pytest.approx(affordable_ms)


def test_retry_after_is_when_the_queue_is_short_enough() -> None:
    settings = Settings(admission="priced", ttft_slo_ms=100_000.0, price_exponent=2.0)
    admission = make_admission(settings)
    rejection = admission.at_arrival(
        RequestView("r"), choice(60_000.0, 25_000.0), choice(0, 0), ClusterView(), 0.0
    )
    # 25 % of the SLO is affordable at a queue of 50 %.
    assert rejection is not None and rejection.retry_after_ms == pytest.approx(10_000.0)


def test_what_it_has_waited_already_counts_as_ttft() -> None:
    assert ask(0.0, 500.0, RequestView("r", prompt_tokens=100, waited_ms=499.0)) is None
    rejection = ask(0.0, 500.0, RequestView("r", prompt_tokens=100, waited_ms=501.0))
    assert rejection is not None and rejection.reason is RejectReason.TTFT_SLO


def document(number: int, blocks: int) -> RequestView:
    return RequestView("r", blocks * 100, block_hashes([number] * (blocks * 100), 100))


def test_what_others_have_asked_for_is_paid_by_all_of_them() -> None:
    view = ClusterView(prefix=PrefixIndex(100))
    admission = make_admission(SETTINGS)
    answers = [ask(500.0, 500.0, document(1, 5), view, admission) for _ in range(3)]
    # 250 ms are affordable; the second of them would pay half of 500.
    assert [answer is None for answer in answers] == [False, True, True]
    assert ask(500.0, 500.0, document(2, 5), view, admission) is not None


def test_only_the_part_that_must_be_computed_is_shared() -> None:
    index = PrefixIndex(100)
    worker = index.add_worker("w")
    request = document(1, 8)
    index.apply(worker, [BlockStored([1, 2, 3, 4], None, [1] * 400, 100)])
    view, admission = ClusterView(prefix=index), make_admission(SETTINGS)
    make_admission(SETTINGS)
    assert ask(500.0, 400.0, request, view, admission, prefix_blocks=4) is not None
    assert ask(500.0, 400.0, request, view, admission, prefix_blocks=4) is None


def test_a_long_context_pays_for_what_it_adds_to_every_step() -> None:
    # 50 requests of 1,000 tokens on one instance: 110 ms beyond the SLO; 20 of them: 50 ms.
    decode = (InstanceState("d0"),)
    busy = ClusterView(decode=decode, forecast=Forecast(20, 20_000.0))
    assert ask(0.0, 10.0, RequestView("r", prompt_tokens=20_000), busy) is None  # adds 21 of 25 ms
    rejection = ask(0.0, 10.0, RequestView("r", prompt_tokens=30_000), busy)
    assert rejection is not None and rejection.reason is RejectReason.DECODE_LOAD
    full = ClusterView(decode=decode, forecast=Forecast(50, 50_000.0))
    assert ask(0.0, 10.0, RequestView("r", prompt_tokens=1), full) is not None


def test_no_room_for_its_kv_is_a_rejection() -> None:
    decode = (InstanceState("d0", kv_capacity_tokens=10_000),)
    view = ClusterView(decode=decode, forecast=Forecast(1, 9_950.0))
    assert ask(0.0, 10.0, RequestView("r", prompt_tokens=50), view) is None
    assert ask(0.0, 10.0, RequestView("r", prompt_tokens=51), view) is not None
