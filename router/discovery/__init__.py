"""Where the list of engines comes from: one source a file, chosen by `discovery.source`."""

from collections.abc import Sequence

from kvcore.errors import ConfigError
from router.discovery.base import Discovery
from router.discovery.config import DiscoveryConfig
from router.discovery.file import FileDiscovery
from router.discovery.static import StaticDiscovery
from router.instance_spec import InstanceSpec

__all__ = ["Discovery", "StaticDiscovery", "make_discovery"]


def make_discovery(config: DiscoveryConfig, specs: Sequence[InstanceSpec]) -> Discovery:
    """`specs`: the engines the configuration names, for source "static". In a running event loop. ConfigError
    when a source can never work."""
    if config.source == "static":
        return StaticDiscovery(specs)
    if config.source == "file":
        return FileDiscovery(config)
    try:
        # Imported only where they are used: their libraries come with an extra of their own.
        if config.source == "redis":
            from router.discovery.redis import RedisDiscovery

            return RedisDiscovery(config)
        from router.discovery.kubernetes import KubernetesDiscovery

        return KubernetesDiscovery(config)
    except ImportError as error:
        raise ConfigError(
            f"--discovery.source {config.source}: {error}; pip install 'mooncake-kv-suite[discovery]'"
        ) from error
