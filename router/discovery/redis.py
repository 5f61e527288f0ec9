"""Engines registered in Redis (or Valkey), each for a time to live, by `mooncake-router register`."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence

from redis.asyncio import Redis
from redis.exceptions import RedisError

from kvcore.errors import ConfigError
from router.discovery.base import EngineEntry, checked
from router.discovery.config import DiscoveryConfig
from router.discovery.registration import Roll
from router.instance_spec import InstanceSpec

logger = logging.getLogger(__name__)

_TIMEOUT_S = 5.0


class RedisDiscovery:
    def __init__(self, config: DiscoveryConfig) -> None:
        """ConfigError when the URL cannot be understood."""
        try:
            self._redis = Redis.from_url(
                config.redis_url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S
            )
        except ValueError as error:
            raise ConfigError(f"--discovery.redis-url {config.redis_url!r}: {error}") from error
        self._key = config.redis_key
        self._interval_s = config.interval_ms / 1e3
        self._roll = Roll()
        self._is_reached = True
        self._has_complained = False

    async def changes(self) -> AsyncIterator[Sequence[InstanceSpec]]:
        last: list[EngineEntry] | None = None
        try:
            while True:
                entries = await self._look()
                if entries is None and last is None:
                    entries = []
                if entries is not None and entries != last:
                    last = entries
                    try:
                        yield checked(entries)
                    except ConfigError as error:
                        logger.error(
                            "the engines in Redis cannot be used; the last good ones stay: %s", error
                        )
                await asyncio.sleep(self._interval_s)
        finally:
            await self._redis.aclose()

    async def _look(self) -> list[EngineEntry] | None:
        """None: Redis could not be asked."""
        now = asyncio.get_running_loop().time
        try:
            async with self._redis.pipeline(transaction=False) as pipe:
                pipe.time()
                pipe.hgetall(self._key)
                (seconds, micros), fields = await pipe.execute()
            num_malformed = self._roll.num_malformed
            old = self._roll.read(fields, seconds * 1000 + micros // 1000, now())
            if self._roll.num_malformed > num_malformed and not self._has_complained:
                self._has_complained = True
                logger.warning("%s holds something that is no registration of an engine", self._key)
            if old:
                await self._redis.hdel(self._key, *old)
        except (RedisError, OSError) as error:
            if self._is_reached:
                logger.warning("Redis cannot be asked for engines; the last ones stay: %s", error)
            self._is_reached = False
            return None
        if not self._is_reached:
            logger.info("Redis can be asked for engines again")
            self._is_reached = True
            self._roll.reached_again(now())
        return self._roll.entries(now())
