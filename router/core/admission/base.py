"""The contract of an admission policy, and what all of them share.

The paper (arXiv 2407.00079, section 7) measures load as predicted latency / SLO, for TTFT on the prefill side
and TBT on the decode side, and asks when the decode side should be looked at.
"""

from __future__ import annotations

from typing import Protocol

from router.core.decision import MIN_RETRY_AFTER_MS, Choice, Rejection, RejectReason
from router.core.settings import Settings
from router.core.view import ClusterView, RequestView


class Admission(Protocol):
    """Both calls return None to admit. SLOs of 0 are no limits."""

    def at_arrival(
        self, request: RequestView, prefill: Choice, decode: Choice, view: ClusterView, now: float
    ) -> Rejection | None:
        """Before anything is sent. Both choices carry predictions (`predicted_ms`)."""
        ...

    def after_prefill(
        self, request: RequestView, decode: Choice, view: ClusterView, now: float
    ) -> Rejection | None:
        """When the prefill is done and decoding would begin; `decode` as predicted now. A rejection here has
        wasted a prefill."""
        ...


def limit_ms(request_slo_ms: float, cluster_slo_ms: float, request: RequestView, settings: Settings) -> float:
    """The SLO that counts, 0 for none; requests of low priority may use up a share of it only."""
    slo_ms = request_slo_ms or cluster_slo_ms
    return slo_ms * settings.sheddable_slo_share if request.priority > 0 else slo_ms


def check_ttft(request: RequestView, prefill: Choice, settings: Settings) -> Rejection | None:
    limit = limit_ms(request.ttft_slo_ms, settings.ttft_slo_ms, request, settings)
    predicted_ms = request.waited_ms + prefill.predicted_ms
    if not limit or predicted_ms <= limit:
        return None
    # The queue drains in real time: when this much of it is gone, the same request fits.
    retry_after_ms = max(predicted_ms - limit, MIN_RETRY_AFTER_MS)
    return Rejection(RejectReason.TTFT_SLO, retry_after_ms, predicted_ms, limit)


def check_decode_now(
    request: RequestView, decode: Choice, view: ClusterView, settings: Settings
) -> Rejection | None:
    """The decode load as it is at this moment, on the instance chosen."""
    if decode.short_of_kv_tokens:
        return Rejection(
            RejectReason.KV_ROOM, retry_after_decode_ms(view), float(decode.short_of_kv_tokens), 0.0
        )
    limit = limit_ms(request.tbt_slo_ms, settings.tbt_slo_ms, request, settings)
    if not limit or decode.predicted_ms <= limit:
        return None
    return Rejection(RejectReason.TBT_SLO, retry_after_decode_ms(view), decode.predicted_ms, limit)


def retry_after_decode_ms(view: ClusterView) -> float:
    """About when the next of the running requests ends."""
    running = sum(instance.running_requests for instance in view.decode or view.mixed)
    if view.forecast is None or not running:
        return MIN_RETRY_AFTER_MS
    return max(view.forecast.mean_decode_ms / running, MIN_RETRY_AFTER_MS)
