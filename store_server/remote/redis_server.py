"""A Redis or Valkey server, for deployments that have one and no object store."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

from kvcore.errors import ConfigError
from store_server.remote.backend import RemoteFailure
from store_server.remote.config import RemoteConfig

try:
    from redis.asyncio import Redis
    from redis.exceptions import RedisError
except ImportError as error:
    raise ConfigError(
        "storage_levels: Redis and Valkey need redis-py: pip install 'mooncake-kv-suite[remote]'"
    ) from error

PREFIX = "mooncake-kv/"
_LARGEST_BYTES = 512 << 20  # of one value (proto-max-bulk-len)
_SCAN_COUNT = 1000


class RedisBackend:
    """A RemoteBackend. Its keys begin with PREFIX, so the server may be used for other things as well. The
    memory limit is the server's own (maxmemory with an allkeys policy): what it drops becomes a miss."""

    def __init__(self, config: RemoteConfig) -> None:
        self._url = config.public_url
        timeout_s = config.timeout_ms / 1e3
        settings: dict[str, Any] = {
            "socket_timeout": timeout_s,
            "socket_connect_timeout": timeout_s,
            "max_connections": 4 * config.num_requests,
            **config.options,
        }
        url = config.url.replace("valkey", "redis", 1) if config.scheme.startswith("valkey") else config.url
        try:
            self._redis: Redis = Redis.from_url(url, **settings)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"storage_levels: remote {self._url}: {error}") from error

    async def put(self, name: str, value: bytes) -> None:
        if len(value) > _LARGEST_BYTES:
            raise RemoteFailure(f"{self._url}: {len(value)} bytes are more than one value may have")
        try:
            await self._redis.set(PREFIX + name, value)
        except (RedisError, OSError) as error:
            raise RemoteFailure(f"{self._url}: {error}") from error

    async def get(self, name: str) -> memoryview | None:
        try:
            value: Any = await self._redis.get(PREFIX + name)
        except (RedisError, OSError) as error:
            raise RemoteFailure(f"{self._url}: {error}") from error
        return None if value is None else memoryview(value)

    async def delete(self, names: Sequence[str]) -> None:
        try:
            await self._redis.unlink(*(PREFIX + name for name in names))
        except (RedisError, OSError) as error:
            raise RemoteFailure(f"{self._url}: {error}") from error

    async def list(self) -> AsyncIterator[list[str]]:
        cursor = 0
        try:
            while True:
                answer: Any = await self._redis.scan(cursor, match=PREFIX + "*", count=_SCAN_COUNT)
                cursor, keys = answer
                yield [key.decode()[len(PREFIX) :] for key in keys]
                if not cursor:
                    return
        except (RedisError, OSError) as error:
            raise RemoteFailure(f"{self._url}: {error}") from error

    async def close(self) -> None:
        await self._redis.aclose()
