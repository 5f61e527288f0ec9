"""Each in turn, whatever its load."""

from collections.abc import Sequence

from router.core.decision import Choice
from router.core.policies.base import EMPTY_POOL
from router.core.view import ClusterView, InstanceState, RequestView


class RoundRobin:
    def __init__(self) -> None:
        self._turn = 0

    def choose(
        self, request: RequestView, pool: Sequence[InstanceState], view: ClusterView, now: float
    ) -> Choice:
        if not pool:
            return EMPTY_POOL
        instance = pool[self._turn % len(pool)]
        if not request.excluded:  # a retry takes nobody's turn: else one dead engine of two gets them all
            self._turn += 1
        return Choice(instance, "round_robin")
