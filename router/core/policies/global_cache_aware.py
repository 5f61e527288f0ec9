"""Algorithm 1 of the Mooncake paper: least predicted TTFT, fetching remote prefixes where that pays."""

from collections.abc import Sequence

from router.core.algorithm1 import select_prefill
from router.core.decision import Choice
from router.core.policies.base import EMPTY_POOL
from router.core.settings import Settings
from router.core.view import ClusterView, InstanceState, RequestView


class GlobalCacheAware:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._threshold = settings.kvcache_balancing_threshold
        self._compute_weight = 1.0
        self._turn = 0

    def choose(
        self, request: RequestView, pool: Sequence[InstanceState], view: ClusterView, now: float
    ) -> Choice:
        if not pool:
            return EMPTY_POOL
        match = view.prefix.match(request.block_hashes, now) if view.prefix is not None else None
        turn = self._turn % len(pool)
        self._turn += 1
        return select_prefill(
            request,
            (*pool[turn:], *pool[:turn]),
            match,
            view,
            now,
            self._settings.prefill_model,
            self._settings.transfer_model,
            self._threshold,
            self._compute_weight,
        )
