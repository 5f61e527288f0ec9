"""Eviction policies by name: one file each, chosen by the store's `eviction_policy`."""

from collections.abc import Callable
from functools import partial

from store_server.core.eviction.base import Evictable, EvictionPolicy
from store_server.core.eviction.length_aware import LengthAwarePolicy
from store_server.core.eviction.lfu import LfuPolicy
from store_server.core.eviction.lru import LruPolicy
from store_server.core.eviction.prefix_aware import PrefixAwarePolicy
from store_server.core.eviction.s3fifo import S3FifoPolicy
from store_server.core.eviction.sieve import SievePolicy

_ORDERS: dict[str, Callable[[], EvictionPolicy]] = {
    "lru": LruPolicy,
    "lfu": LfuPolicy,
    "length_aware": LengthAwarePolicy,
    "sieve": SievePolicy,
    "s3fifo": S3FifoPolicy,
}


def _prefix_aware(order: Callable[[], EvictionPolicy]) -> EvictionPolicy:
    return PrefixAwarePolicy(order())


POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    **_ORDERS,
    **{f"prefix_{name}": partial(_prefix_aware, order) for name, order in _ORDERS.items()},
}

__all__ = ["POLICIES", "Evictable", "EvictionPolicy"]
