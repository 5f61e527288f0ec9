"""Who is measured: `--kv-transfer-config` of each, and what it needs beside its engines.

What runs beside engines is ended with them. Peers are used as their documentation says; where that needs
something on a machine without accelerators, or for two engines on one host, it is said here.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from demo_lib.cluster import BLOCK_SIZE_TOKENS
from demo_lib.processes import Processes, free_ports
from storebench.systems.mooncake import QUIET, Master

from connectorbench.figures import PLAIN
from tests.engine.packages import MOONCAKE_ENVIRONMENT, mooncake_transfer_engine, unpacked
from tests.engine.split import NIXL, PROTOCOLS, Setting

POOL_BYTES = 1 << 30  # more than the rounds of a phase write
LMCACHE = "lmcache==0.5.6"
_READY_TIMEOUT_S = 120.0
_SMALLEST_SEGMENT_BYTES = 16 << 20

# By the role of an engine: "prefill" (the one that computes and saves) or "decode" (the one that loads).
SettingOf = Callable[[str], Setting]


class Site(NamedTuple):
    """Where a system may put its files, and a port that a router has to know beforehand."""

    folder: Path
    bootstrap_port: int


class System(NamedTuple):
    """`pd_protocol`: the router's, if it is measured as a prefill and a decode engine."""

    about: str
    settings: Callable[[Site], AbstractContextManager[SettingOf]]
    pd_protocol: str | None = None


@contextmanager
def _plain(site: Site) -> Iterator[SettingOf]:
    yield lambda role: Setting({}, {})


@contextmanager
def _ours(site: Site, *, plane: str) -> Iterator[SettingOf]:
    with Processes(site.folder) as processes:
        port, admin_port = free_ports(2)
        command = [sys.executable, "-m", "store_server.cli", "serve", "--host", "127.0.0.1"]
        command += ["--port", str(port), "--admin-port", str(admin_port)]
        processes.start("store", [*command, "--pool-size-bytes", str(POOL_BYTES)], {})
        ready = {"store": f"http://127.0.0.1:{admin_port}/ready"}
        processes.wait_until_ready(ready, _READY_TIMEOUT_S, lambda name: None)
        transfer = {
            "kv_connector": "MooncakeSuiteConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"store_address": f"127.0.0.1:{port}", "planes": [plane]},
        }
        yield lambda role: Setting(transfer, {})


@contextmanager
def _mooncake_store(site: Site) -> Iterator[SettingOf]:
    """Each engine contributes a segment (`mode: embedded`). The second's is as small as Mooncake takes, so
    that what the first has computed lies with the first. Without ports of their own for lookups, engines
    of one host take each other's socket."""
    package = mooncake_transfer_engine()
    master = Master("mooncake-store")
    try:
        master.start(package, site.folder)

        def setting(role: str) -> Setting:
            segment_bytes = POOL_BYTES if role == "prefill" else _SMALLEST_SEGMENT_BYTES
            config = {
                "metadata_server": "P2PHANDSHAKE",
                "master_server_address": master.address,
                "protocol": "tcp",
                "device_name": "",
                "global_segment_size": segment_bytes,
                "local_buffer_size": 128 << 20,
            }
            path = site.folder / f"mooncake-{role}.json"
            path.write_text(json.dumps(config))
            transfer = {
                "kv_connector": "MooncakeStoreConnector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"lookup_rpc_port": free_ports(1)[0]},
            }
            environment = {"PYTHONPATH": str(package), "MOONCAKE_CONFIG_PATH": str(path)}
            return Setting(transfer, {**MOONCAKE_ENVIRONMENT, **QUIET, **environment})

        yield setting
    finally:
        master.stop()


@contextmanager
def _lmcache(site: Site) -> Iterator[SettingOf]:
    """Its server, and the connector of its own package: vLLM's copy of it records CUDA events. Without
    accelerators engines move the bytes themselves, which the server has to allow. Chunks are as long as
    blocks: of its default of 256 tokens, up to 255 at the end of a prompt would have to be computed."""
    package = unpacked(LMCACHE, LMCACHE)
    environment = {
        "PYTHONPATH": str(package),
        "LMCACHE_TRACK_USAGE": "false",
        "LMCACHE_LOG_LEVEL": "WARNING",
        "LMCACHE_DISABLE_BANNER": "1",
    }
    with Processes(site.folder) as processes:
        port, http_port = free_ports(2)
        command = [sys.executable, "-m", "lmcache.cli.main", "server", "--host", "127.0.0.1"]
        command += ["--port", str(port), "--http-host", "127.0.0.1", "--http-port", str(http_port)]
        command += ["--disable-observability", "--supported-transfer-mode", "auto"]
        command += ["--l1-size-gb", str(POOL_BYTES >> 30), "--eviction-policy", "LRU"]
        command += ["--chunk-size", str(BLOCK_SIZE_TOKENS), "--max-workers", "2"]
        processes.start("lmcache", command, environment)
        ready = {"lmcache": f"http://127.0.0.1:{http_port}/healthcheck"}
        processes.wait_until_ready(ready, _READY_TIMEOUT_S, lambda name: None)
        transfer = {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port},
        }
        yield lambda role: Setting(transfer, environment)


@contextmanager
def _offloading(site: Site) -> Iterator[SettingOf]:
    extra = {"spec_name": "CPUOffloadingSpec", "cpu_bytes_to_use": POOL_BYTES}
    transfer = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    yield lambda role: Setting(transfer, {})


def _split(site: Site, *, protocol: str) -> AbstractContextManager[SettingOf]:
    return PROTOCOLS[protocol](site.folder, site.bootstrap_port)


_SUITE = "MooncakeSuiteConnector with one mooncake-store"

SYSTEMS = {
    PLAIN: System("vLLM without a connector", _plain),
    "ours-tcp": System(f"{_SUITE}, plane tcp", partial(_ours, plane="tcp"), pd_protocol="suite"),
    "ours-shm": System(f"{_SUITE}, plane shm", partial(_ours, plane="shm")),
    "mooncake-store": System(
        "vLLM's MooncakeStoreConnector with Mooncake 0.3.13 over TCP; segment in the engine that saves",
        _mooncake_store,
    ),
    "lmcache": System(f"LMCacheMPConnector of {LMCACHE} with its server; bytes through /dev/shm", _lmcache),
    "offloading": System("vLLM's OffloadingConnector (CPUOffloadingSpec)", _offloading),
    "nixl": System(
        f"vLLM's NixlConnector with {NIXL[0]}, UCX over TCP",
        partial(_split, protocol="nixl"),
        pd_protocol="nixl",
    ),
    "mooncake": System(
        "vLLM's MooncakeConnector with Mooncake 0.3.13 over TCP",
        partial(_split, protocol="mooncake"),
        pd_protocol="mooncake",
    ),
}
