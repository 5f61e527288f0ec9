"""The less loaded of two instances drawn at random (Mitzenmacher 2001).

Near least_loaded, without its herding on one instance when several routers share stale loads.
"""

from collections.abc import Sequence

from router.core.decision import Choice
from router.core.policies.base import EMPTY_POOL, least_loaded
from router.core.prng import SplitMix64
from router.core.view import ClusterView, InstanceState, RequestView


class PowerOfTwo:
    def __init__(self, prng: SplitMix64) -> None:
        self._prng = prng

    def choose(
        self, request: RequestView, pool: Sequence[InstanceState], view: ClusterView, now: float
    ) -> Choice:
        if not pool:
            return EMPTY_POOL
        first = self._prng.below(len(pool))
        if len(pool) == 1:
            return Choice(pool[0], "power_of_two")
        second = (first + 1 + self._prng.below(len(pool) - 1)) % len(pool)
        return least_loaded((pool[first], pool[second]), 0, "power_of_two")
