"""Algorithm 1 over prefill instances and, while all of those are behind, decode instances with time to spare.

A decode step is bound by memory: beside it a chunk of a prompt is computed almost for free, as long as the
longer step still keeps the TBT SLO. Which instances have that much time left is known from the batch they
hold, so the pools follow the load without anybody changing roles. The one chosen does both legs, and no KV is
sent. Needs `decode_chunk_tokens`, the engines' own limit of a step; without a TBT SLO any step is fine.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.core.decision import Choice
from router.core.policies.global_cache_aware import GlobalCacheAware
from router.core.settings import Settings
from router.core.view import ClusterView, InstanceState, RequestView

# Computing delays everybody behind, not only this request: where instances differ in what they hold of a
# prompt, a longer wait for the prefix is the better choice for all.
COMPUTE_WEIGHT = 4.0


class Elastic(GlobalCacheAware):
    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._compute_weight = COMPUTE_WEIGHT
        self._chunk_tokens = settings.decode_chunk_tokens

    def choose(
        self, request: RequestView, pool: Sequence[InstanceState], view: ClusterView, now: float
    ) -> Choice:
        choice = super().choose(request, pool, view, now)
        if choice.instance is None or not self._chunk_tokens or not view.decode:
            return choice
        # Not worth disturbing a batch for: it would wait less than it computes.
        if choice.predicted_ms <= 2 * choice.compute_ms:
            return choice
        block = view.prefix.block_size_tokens if view.prefix is not None else 0
        uncached_tokens = max(1, request.prompt_tokens - choice.prefix_blocks * block)
        helpers = [d for d in view.decode if self._has_time(d, request, uncached_tokens)]
        if not helpers:
            return choice
        return super().choose(request, (*pool, *helpers), view, now)

    def _has_time(self, instance: InstanceState, request: RequestView, uncached_tokens: int) -> bool:
        """Its steps keep the TBT SLO with a chunk of this prompt in them, the last and most expensive one,
        even when all that are bound to decode there do."""
        settings = self._settings
        prompt_tokens = request.prompt_tokens
        if instance.instance_id in request.excluded:
            return False
        needed_tokens = instance.kv_used_tokens + prompt_tokens + settings.expected_output_tokens
        if instance.kv_capacity_tokens and needed_tokens > instance.kv_capacity_tokens:
            return False
        chunk_ms = settings.prefill_model.compute_ms(
            prompt_tokens, max(0, prompt_tokens - min(uncached_tokens, self._chunk_tokens))
        )
        batch_ms = settings.decode_model.tbt_ms(instance.running_requests, instance.kv_used_tokens)
        limit_ms = request.tbt_slo_ms or settings.tbt_slo_ms
        return not limit_ms or batch_ms + chunk_ms <= limit_ms
