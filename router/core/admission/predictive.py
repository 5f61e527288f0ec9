"""Early rejection on predicted load (paper section 7.4, system level).

The decode side is judged as it will be when this request's prefill is done: requests whose prefill ends
before then are added, those that have then decoded for t_d are gone, and the average TBT over all decode
instances is held against the SLO.
"""

from __future__ import annotations

from router.core.admission.base import check_ttft, limit_ms, retry_after_decode_ms
from router.core.decision import Choice, Rejection, RejectReason
from router.core.settings import Settings
from router.core.view import ClusterView, DecodeForecast, RequestView


class Predictive:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def at_arrival(
        self, request: RequestView, prefill: Choice, decode: Choice, view: ClusterView, now: float
    ) -> Rejection | None:
        rejection = check_ttft(request, prefill, self._settings)
        pool = view.decode or view.mixed
        if rejection is not None or view.forecast is None or not pool:
            return rejection
        requests, kv_tokens = self._load_at(view.forecast, now + prefill.predicted_ms / 1e3, now)
        capacity = sum(instance.kv_capacity_tokens for instance in pool)
        if capacity and all(instance.kv_capacity_tokens for instance in pool):
            short = kv_tokens + request.prompt_tokens - capacity
            if short > 0:
                return Rejection(RejectReason.KV_ROOM, retry_after_decode_ms(view), short, 0.0)
        limit = limit_ms(request.tbt_slo_ms, self._settings.tbt_slo_ms, request, self._settings)
        scale = sum(instance.tbt_scale for instance in pool) / len(pool)
        tbt_ms = scale * self._settings.decode_model.tbt_ms(
            (requests + 1) / len(pool), (kv_tokens + request.prompt_tokens) / len(pool)
        )
        if not limit or tbt_ms <= limit:
            return None
        return Rejection(RejectReason.DECODE_LOAD, retry_after_decode_ms(view), tbt_ms, limit)

    def after_prefill(
        self, request: RequestView, decode: Choice, view: ClusterView, now: float
    ) -> Rejection | None:
        return None

    def _load_at(self, forecast: DecodeForecast, at: float, now: float) -> tuple[float, float]:
        return forecast.uniform_load_at(at, self._settings.decode_ms or forecast.mean_decode_ms)
