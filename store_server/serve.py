"""`mooncake-store serve`: from a configuration to a running store, until SIGTERM or SIGINT."""

import asyncio
import contextlib
import gc
import ipaddress
import json
import logging
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import uvloop

from kvcore.errors import ConfigError
from kvcore.logs import announce, configure_logging
from kvcore.units import format_size
from store_server.config import StoreConfig
from store_server.notify import notify
from store_server.server import StoreServer

logger = logging.getLogger(__name__)

# As gc.set_threshold takes them.
_NEW_CONTAINERS, _YOUNG_COLLECTIONS, _COLLECTIONS_BEFORE_FULL = 10_000, 20, 1000


def serve(config: StoreConfig, ready_file: Path | None) -> None:
    """Returns after a graceful stop. ConfigError or OSError when the store cannot run here as told."""
    config.check()
    configure_logging(config.log_level, as_json=config.log_json)
    uvloop.run(_run(config, ready_file))


async def _run(config: StoreConfig, ready_file: Path | None) -> None:
    for warning in exposure_warnings(config):
        logger.warning(warning)
    server = StoreServer(config)
    stopping, loop = server.stopping, asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    stop_admin: Callable[[], Awaitable[None]] | None = None
    admin_port = 0
    try:
        await server.start()
        if config.admin_port >= 0:
            # Not at the top: importing aiohttp takes longer than starting everything else.
            from store_server.admin import Admin

            admin = Admin(
                server.stats, server.requests_by_type, server.stats_by_tenant, state=lambda: _state(server)
            )
            stop_admin = admin.stop
            await admin.start(config.admin_host, config.admin_port)
            admin_port = admin.port
        addresses = _addresses(config, server, admin_port)
        if ready_file is not None:
            _write_whole(ready_file, addresses)
        announce(
            f"mooncake-store ready on {addresses['address']} and {addresses['unix_address']}, "
            f"pool {format_size(server.pool.size_bytes)}, admin {addresses['admin_url'] or 'off'}"
        )
        notify("READY=1")
        _calm_garbage_collector()
        await stopping.wait()
    finally:
        notify("STOPPING=1")
        if ready_file is not None:
            _remove(ready_file)
        if stop_admin is not None:
            await stop_admin()
        await server.stop()


def _calm_garbage_collector() -> None:
    """A full collection looks at every object of the store: 39 ms for 300,000, in which nobody is served.
    What lives as long as the process need not be looked at, and what comes and goes forms no cycles
    (connections cut theirs), so a full collection is only left for what goes wrong."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_CONTAINERS, _YOUNG_COLLECTIONS, _COLLECTIONS_BEFORE_FULL)


def exposure_warnings(config: StoreConfig) -> list[str]:
    """What whoever starts the store should know about who can reach it."""
    warnings = []
    if not _is_local(config.host):
        if not config.token and not config.tenants and not config.tls_client_ca:
            warnings.append(
                f"anybody who can reach {config.host} can read and change everything in this store: set "
                "MOONCAKE_STORE_TOKEN, or listen on 127.0.0.1 only"
            )
        if not config.tls_cert:
            warnings.append(
                f"what clients send to {config.host} and receive can be read on the network, tokens too: set "
                "tls_cert and tls_key unless the network is private"
            )
    if config.admin_port >= 0 and not _is_local(config.admin_host):
        warnings.append(f"anybody who can reach {config.admin_host} can read /metrics and /stats")
    return warnings


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _state(server: StoreServer) -> str:
    if server.stopping.is_set():
        return "stopping"
    return "draining" if server.drainer.is_draining else "ready"


def _addresses(config: StoreConfig, server: StoreServer, admin_port: int) -> dict[str, object]:
    def join(host: str, port: int) -> str:
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    events_endpoint, events_replay_endpoint = server.events.endpoints if server.events else ("", "")
    return {
        "pid": os.getpid(),
        "host": config.host,
        "port": server.tcp_port,
        "address": ("tls://" if config.tls_cert else "") + join(config.host, server.tcp_port),
        "unix_address": f"unix://{server.unix_path}",
        "admin_url": f"http://{join(config.admin_host, admin_port)}" if admin_port else "",
        "pool_size_bytes": server.pool.size_bytes,
        "events_endpoint": events_endpoint,
        "events_replay_endpoint": events_replay_endpoint,
    }


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _write_whole(path: Path, content: dict[str, object]) -> None:
    """Renamed into place: whoever waits for the file never reads half of it."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(content) + "\n")
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(f"--ready-file {path} cannot be written: {error.strerror}") from error
