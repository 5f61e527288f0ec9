"""The instance with the fewest requests (the paper's "load balancing" baseline)."""

from collections.abc import Sequence

from router.core.decision import Choice
from router.core.policies.base import EMPTY_POOL, least_loaded
from router.core.view import ClusterView, InstanceState, RequestView


class LeastLoaded:
    def __init__(self) -> None:
        self._turn = 0

    def choose(
        self, request: RequestView, pool: Sequence[InstanceState], view: ClusterView, now: float
    ) -> Choice:
        if not pool:
            return EMPTY_POOL
        turn = self._turn % len(pool)
        self._turn += 1
        return least_loaded(pool, turn, "least_loaded")
