"""What the remote level needs of a remote, and the choice of one by its URL."""

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from store_server.remote.config import REDIS_SCHEMES, RemoteConfig


class RemoteFailure(Exception):
    """The remote did not do what it was asked for: it is down, refuses, or is misconfigured."""


class RemoteBackend(Protocol):
    """Whole values under names that are paths of letters, digits, dots and slashes. Used in one loop; every
    method may be cancelled. What goes wrong is a RemoteFailure."""

    async def put(self, name: str, value: bytes) -> None:
        """The value appears whole or not at all; replaces."""
        ...

    async def get(self, name: str) -> memoryview | None:
        """None: no such name."""
        ...

    async def delete(self, names: Sequence[str]) -> None:
        """Names that are not there are no failure."""
        ...

    def list(self) -> AsyncIterator[list[str]]:
        """All names, some at a time."""
        ...

    async def close(self) -> None: ...


def make_backend(config: RemoteConfig) -> RemoteBackend:
    """Connects to nothing yet. ConfigError when the settings or an uninstalled library forbid it."""
    if config.scheme in REDIS_SCHEMES:
        from store_server.remote.redis_server import RedisBackend

        return RedisBackend(config)
    from store_server.remote.object_store import ObjectStoreBackend

    return ObjectStoreBackend(config)
