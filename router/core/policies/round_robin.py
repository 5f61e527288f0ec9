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
        self._turn += 1
        return Choice(instance, "round_robin")
