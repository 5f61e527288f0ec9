"""Any instance, all alike (the paper's "random" baseline)."""

from collections.abc import Sequence

from router.core.decision import Choice
from router.core.policies.base import EMPTY_POOL
from router.core.prng import SplitMix64
from router.core.view import ClusterView, InstanceState, RequestView


class Random:
    def __init__(self, prng: SplitMix64) -> None:
        self._prng = prng

    def choose(
        self, request: RequestView, pool: Sequence[InstanceState], view: ClusterView, now: float
    ) -> Choice:
        if not pool:
            return EMPTY_POOL
        return Choice(pool[self._prng.below(len(pool))], "random")
