"""The Mooncake papers' figures, drawn again by the simulator: `mooncake-sim paper NAME`."""

from collections.abc import Callable

from kvsim.paper import caching, capacity, long_context, overload, policy, scheduling, sizing
from kvsim.paper.base import Figure, Many, Traces

FIGURES: dict[str, Callable[[Traces, Many], Figure]] = {
    "scheduling": scheduling.run,
    "capacity": capacity.run,
    "hit_rate": caching.by_capacity,
    "global_cache": caching.global_cache,
    "replicas": caching.replicas,
    "bandwidth": sizing.bandwidth,
    "ratio": sizing.ratio,
    "overload": overload.run,
    "long_context": long_context.run,
    "policy": policy.run,
}

__all__ = ["FIGURES", "Figure", "Many", "Traces"]
