"""Policies by the name a user gives (`--policy`, `--prefill-policy`, `--decode-policy`)."""

from collections.abc import Callable

from kvcore.errors import ConfigError
from router.core.policies.base import Policy
from router.core.policies.cache_aware import CacheAware
from router.core.policies.elastic import Elastic
from router.core.policies.global_cache_aware import GlobalCacheAware
from router.core.policies.least_loaded import LeastLoaded
from router.core.policies.least_tbt import LeastTbt
from router.core.policies.power_of_two import PowerOfTwo
from router.core.policies.random import Random
from router.core.policies.round_robin import RoundRobin
from router.core.policies.session_sticky import SessionSticky
from router.core.settings import Settings

POLICIES: dict[str, Callable[[Settings], Policy]] = {
    "round_robin": lambda settings: RoundRobin(),
    "least_loaded": lambda settings: LeastLoaded(),
    "random": lambda settings: Random(settings.prng()),
    "power_of_two": lambda settings: PowerOfTwo(settings.prng()),
    "session_sticky": lambda settings: SessionSticky(),
    "cache_aware": CacheAware,
    "global_cache_aware": GlobalCacheAware,
    "elastic": Elastic,
    "least_tbt": LeastTbt,
}


def make_policy(name: str, settings: Settings) -> Policy:
    """ConfigError, naming the known ones, when there is no such policy."""
    if name not in POLICIES:
        raise ConfigError(f"no routing policy {name!r}; there are: {', '.join(sorted(POLICIES))}")
    return POLICIES[name](settings)
