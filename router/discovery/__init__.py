"""Where the list of engines comes from: one source a file, chosen by `discovery.source`."""

from collections.abc import Callable, Sequence

from router.discovery.base import Discovery
from router.discovery.config import DiscoveryConfig
from router.discovery.file import FileDiscovery
from router.discovery.kubernetes import KubernetesDiscovery
from router.discovery.redis import RedisDiscovery
from router.discovery.static import StaticDiscovery
from router.instance import InstanceSpec

__all__ = ["Discovery", "StaticDiscovery", "make_discovery"]

_WATCHED: dict[str, Callable[[DiscoveryConfig], Discovery]] = {
    "file": FileDiscovery,
    "redis": RedisDiscovery,
    "kubernetes": KubernetesDiscovery,
}


def make_discovery(config: DiscoveryConfig, specs: Sequence[InstanceSpec]) -> Discovery:
    """`specs`: the engines the configuration names, for source "static". In a running event loop. ConfigError
    when a source can never work."""
    if config.source == "static":
        return StaticDiscovery(specs)
    return _WATCHED[config.source](config)
