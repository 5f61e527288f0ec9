"""`mooncake-router register`: keeps one engine registered in Redis while it is healthy. It runs beside it.

The router counts the engine for one time to live after the last renewal, so an engine that hangs, or a host
that vanishes, leaves by itself; SIGTERM takes it out at once, before the engine is stopped.
"""

import argparse
import logging
import signal
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence

import msgspec
from redis import Redis
from redis.exceptions import RedisError

from kvcore.errors import ConfigError
from kvcore.logs import configure_logging
from kvcore.units import parse_duration_ms
from router.core.view import Role
from router.discovery.base import EngineEntry, checked
from router.discovery.config import DiscoveryConfig
from router.discovery.registration import Registration, encode
from router.instance_spec import instance_url

logger = logging.getLogger(__name__)

_TIMEOUT_S = 5.0
_RENEWALS_PER_TTL = 3


def make_parser() -> argparse.ArgumentParser:
    defaults = DiscoveryConfig()
    parser = argparse.ArgumentParser("mooncake-router register", description=__doc__, allow_abbrev=False)
    parser.add_argument("--url", required=True, help="the engine as routers reach it, http://HOST:PORT")
    parser.add_argument("--role", default="mixed", choices=[role.value for role in Role])
    parser.add_argument("--bootstrap-port", type=int, default=0, metavar="PORT", help="of a prefill engine")
    parser.add_argument("--data-parallel-size", type=int, default=1, metavar="N", help="ranks in it")
    parser.add_argument(
        "--kv-events", default="", metavar="ENDPOINT[,REPLAY]", help="where it publishes them"
    )
    parser.add_argument(
        "--store", default="", help="host or address of the store it uses, where that is not on its own host"
    )
    parser.add_argument("--redis-url", default=defaults.redis_url, metavar="URL")
    parser.add_argument("--redis-key", default=defaults.redis_key, metavar="KEY")
    parser.add_argument("--ttl", default="10s", metavar="DURATION", help="renewed three times in each (10s)")
    parser.add_argument("--health-url", default="", metavar="URL", help="default: URL/health")
    return parser


def main(argv: Sequence[str]) -> int:
    """Exit status: 0 after a signal, 2 for a mistake in the arguments."""
    args = make_parser().parse_args(argv)
    configure_logging("info", as_json=False)
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    try:
        entry = EngineEntry(
            url=instance_url(args.url),
            role=Role(args.role),
            bootstrap_port=args.bootstrap_port,
            data_parallel_size=args.data_parallel_size,
            kv_events=args.kv_events,
            store=args.store,
        )
        checked([entry])
        ttl_ms = int(parse_duration_ms(args.ttl))
        if ttl_ms < 100:
            raise ConfigError(f"--ttl {args.ttl}: at least 100 ms")
        redis = Redis.from_url(args.redis_url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S)
    except (ConfigError, ValueError) as error:
        print(f"mooncake-router register: {error}", file=sys.stderr)
        return 2
    with redis:
        keep_registered(
            redis, args.redis_key, entry, ttl_ms, args.health_url or f"{entry.url}/health", stopping
        )
    return 0


def keep_registered(
    redis: "Redis", key: str, entry: EngineEntry, ttl_ms: int, health_url: str, stopping: threading.Event
) -> None:
    """Until `stopping`. Blocks its thread; whatever fails is logged and tried again."""
    was_well: bool | None = None
    while not stopping.is_set():
        is_well = _is_healthy(health_url)
        if is_well:
            is_well = _write(redis, key, entry, ttl_ms, has_left=False)
        if is_well is not was_well:
            logger.info("%s is %sregistered", entry.url, "" if is_well else "not ")
            was_well = is_well
        stopping.wait(ttl_ms / 1e3 / _RENEWALS_PER_TTL)
    _write(redis, key, entry, ttl_ms, has_left=True)


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
            return bool(200 <= answer.status < 300)
    except (OSError, ValueError, urllib.error.URLError) as error:
        logger.debug("%s: %s", url, error)
        return False


def _write(redis: "Redis", key: str, entry: EngineEntry, ttl_ms: int, *, has_left: bool) -> bool:
    try:
        seconds, micros = redis.time()
        registration = Registration(
            entry=entry,
            expires_unix_ms=seconds * 1000 + micros // 1000 + ttl_ms,
            ttl_ms=ttl_ms,
            has_left=has_left,
        )
        redis.hset(key, entry.url, encode(registration))
    except (RedisError, OSError, msgspec.MsgspecError) as error:
        logger.warning("Redis cannot be told of %s: %s", entry.url, error)
        return False
    return True
