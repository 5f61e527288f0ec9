"""Least predicted TTFT when every instance can only use its own prefixes (the paper's "cache-aware" baseline:
Algorithm 1 without transfers)."""

import math

from router.core.policies.global_cache_aware import GlobalCacheAware
from router.core.settings import Settings


class CacheAware(GlobalCacheAware):
    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._threshold = math.inf
