"""Eviction policies by name: one file each, chosen by the store's `eviction_policy`."""

from collections.abc import Callable

from store_server.core.eviction.base import Evictable, EvictionPolicy
from store_server.core.eviction.lru import LruPolicy

POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    "lru": LruPolicy,
}

__all__ = ["POLICIES", "Evictable", "EvictionPolicy"]
