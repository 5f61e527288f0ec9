"""Decode choice of Algorithm 1 (SelectDecodingInstance): least predicted TBT among those with KV room."""

from collections.abc import Sequence

from router.core.algorithm1 import select_decode
from router.core.decision import Choice
from router.core.policies.base import EMPTY_POOL
from router.core.settings import Settings
from router.core.view import ClusterView, InstanceState, RequestView


class LeastTbt:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._turn = 0

    def choose(
        self, request: RequestView, pool: Sequence[InstanceState], view: ClusterView, now: float
    ) -> Choice:
        if not pool:
            return EMPTY_POOL
        turn = self._turn % len(pool)
        self._turn += 1
        expected = self._settings.expected_output_tokens
        if request.max_tokens:
            expected = min(expected, request.max_tokens)
        return select_decode(request, (*pool[turn:], *pool[:turn]), self._settings.decode_model, expected)
