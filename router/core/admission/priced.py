"""Predictive admission with a price: the fuller the cluster, the less a request may cost.

The SLO check alone admits whoever still fits, so that under overload the queue stays as long as the SLO
allows and one long prompt takes the room of many short ones. Here what is left of the SLO sets a price. With
u the share of the TTFT SLO that the chosen queue already takes, a prompt is admitted while

    its own prefill <= TTFT SLO * (1 - u) ^ price_exponent

and with u the predicted decode load, while what it adds to a decode step <= TBT SLO * (1 - u) ^
price_exponent. An idle cluster admits whatever fits (u = 0), and no length or trace is known in advance.

Cached tokens cost nothing, so that prefix hits are served when misses of the same length are refused. And a
part of the prompt that others have asked for before, served or not, is shared with them: refusing the first
question about a long document would make every later one as expensive.
docs/adr/0009 has the reasons and docs/kvsim-policy.md the measurements.
"""

from router.core.admission.base import check_ttft, limit_ms, retry_after_decode_ms
from router.core.decision import MIN_RETRY_AFTER_MS, Choice, Rejection, RejectReason
from router.core.demand import Demand
from router.core.settings import Settings
from router.core.view import ClusterView, InstanceState, RequestView


class Priced:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._exponent = settings.price_exponent
        self._demand = Demand()

    def at_arrival(
        self, request: RequestView, prefill: Choice, decode: Choice, view: ClusterView, now: float
    ) -> Rejection | None:
        seen = self._demand.observe(request.block_hashes, request.waited_ms > 0)
        return (
            check_ttft(request, prefill, self._settings)
            or self._check_prefill_price(request, prefill, self._shared_ms(request, prefill, seen, view))
            or self._check_decode_price(request, prefill, decode, view, now)
        )

    def after_prefill(
        self, request: RequestView, decode: Choice, view: ClusterView, now: float
    ) -> Rejection | None:
        return None

    def _shared_ms(
        self, request: RequestView, prefill: Choice, seen: list[tuple[int, int]], view: ClusterView
    ) -> float:
        """Its prefill, each part divided by how many requests have asked for it, this one included."""
        if view.prefix is None or not seen or not seen[0][1]:
            return prefill.compute_ms
        model, block_size = self._settings.prefill_model, view.prefix.block_size_tokens
        end = request.prompt_tokens
        computed = prefix = min(prefill.prefix_blocks * block_size, end)
        model_ms = shared_ms = 0.0
        for depth, count in (*seen, (len(request.block_hashes) + 1, 0)):
            upto = min(depth * block_size, end)
            if upto > computed:
                part_ms = model.compute_ms(upto, computed) - model.constant_ms
                model_ms += part_ms
                shared_ms += part_ms / (1 + count)
                computed = upto
        # In proportion, so that what was measured on the instance still counts.
        return prefill.compute_ms * shared_ms / model_ms if prefix < end and model_ms else prefill.compute_ms

    def _check_prefill_price(self, request: RequestView, prefill: Choice, cost_ms: float) -> Rejection | None:
        limit = limit_ms(request.ttft_slo_ms, self._settings.ttft_slo_ms, request, self._settings)
        if not limit:
            return None
        waiting_ms = max(prefill.predicted_ms - prefill.compute_ms, 0.0)
        affordable_ms = limit * (1.0 - min(waiting_ms / limit, 1.0)) ** self._exponent
        if cost_ms <= affordable_ms:
            return None
        # As the queue drains the price falls; it has to fall to what this request costs.
        affordable_at = limit * (1.0 - (cost_ms / limit) ** (1.0 / self._exponent))
        retry_after_ms = max(waiting_ms - affordable_at, MIN_RETRY_AFTER_MS)
        return Rejection(RejectReason.PREFILL_PRICE, retry_after_ms, cost_ms, affordable_ms)

    def _check_decode_price(
        self, request: RequestView, prefill: Choice, decode: Choice, view: ClusterView, now: float
    ) -> Rejection | None:
        pool = view.decode or view.mixed
        limit = limit_ms(request.tbt_slo_ms, self._settings.tbt_slo_ms, request, self._settings)
        if view.forecast is None or not pool or not limit:
            return None
        model = self._settings.decode_model
        at = now + prefill.predicted_ms / 1e3
        requests, kv_tokens = view.forecast.expected_load_at(at, now)
        scale = sum(instance.tbt_scale for instance in pool) / len(pool)
        tbt_ms = scale * model.tbt_ms(requests / len(pool), kv_tokens / len(pool))
        added_ms = scale * (model.per_request_ms + model.per_kv_token_ms * request.prompt_tokens)
        load = min(tbt_ms / limit, 1.0)
        affordable_ms = limit * (1.0 - load) ** self._exponent
        if added_ms <= affordable_ms and not self._is_full(request, pool, kv_tokens):
            return None
        return Rejection(RejectReason.DECODE_LOAD, retry_after_decode_ms(view), added_ms, affordable_ms)

    @staticmethod
    def _is_full(request: RequestView, pool: tuple[InstanceState, ...], kv_tokens: float) -> bool:
        capacity = sum(instance.kv_capacity_tokens for instance in pool)
        return bool(capacity) and kv_tokens + request.prompt_tokens > capacity
