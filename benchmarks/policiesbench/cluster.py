"""The engines, the store and the routers of the policy benchmark: commands, and what engines count."""

import json
import sys
import urllib.request
from pathlib import Path
from typing import NamedTuple

from demo_lib.cli import DTYPE
from demo_lib.cluster import BLOCK_SIZE_TOKENS, ENGINE_ENV, KV_CACHE_BYTES, MAX_MODEL_LEN_TOKENS, MODEL_NAME
from demo_lib.processes import Processes, free_ports
from prometheus_client.parser import text_string_to_metric_families

LOCAL, SHARED = "own caches", "and a store"
POLICIES = {
    LOCAL: ("random", "least_loaded", "cache_aware"),
    SHARED: ("random", "least_loaded", "cache_aware", "global_cache_aware"),
}
ENGINE_ENVIRONMENT = {**ENGINE_ENV, "VLLM_SERVER_DEV_MODE": "1"}  # /reset_prefix_cache
_CACHED = "vllm:prefix_cache_hits_total"
_FETCHED = "vllm:external_prefix_cache_hits_total"
_START_TIMEOUT_S = 600.0


class Engine(NamedTuple):
    name: str
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


class Cluster:
    """Two engines for each setup. `sockets`: a folder with a short path, for KV events."""

    def __init__(self, processes: Processes, model: Path, sockets: Path) -> None:
        self._processes, self._model, self._sockets = processes, model, sockets
        ports = free_ports(6)
        self._store_port, self._store_admin = ports[4:]
        self.engines = {
            LOCAL: [Engine("local-0", ports[0]), Engine("local-1", ports[1])],
            SHARED: [Engine("shared-0", ports[2]), Engine("shared-1", ports[3])],
        }

    def start(self) -> None:
        """DemoError when anything does not come up."""
        events = (
            "--events.endpoint",
            self._events("store"),
            "--events.replay-endpoint",
            self._replay("store"),
        )
        ports = ("--port", str(self._store_port), "--admin-port", str(self._store_admin))
        store = [_script("mooncake-store"), "serve", "--host", "127.0.0.1", *ports]
        self._processes.start("store", [*store, "--pool-size-bytes", "2gb", *events], {})
        store_url = f"http://127.0.0.1:{self._store_admin}/ready"
        self._processes.wait_until_ready({"store": store_url}, _START_TIMEOUT_S, lambda name: None)
        urls = {}
        for setup, engines in self.engines.items():
            for engine in engines:
                self._processes.start(engine.name, self._vllm(engine, setup), ENGINE_ENVIRONMENT)
                urls[engine.name] = f"{engine.url}/health"
        self._processes.wait_until_ready(urls, _START_TIMEOUT_S, lambda name: None)

    def _vllm(self, engine: Engine, setup: str) -> list[str]:
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self._events(engine.name),
            "replay_endpoint": self._replay(engine.name),
        }
        command = [
            _script("vllm"), "serve", str(self._model),
            "--host", "127.0.0.1",
            "--port", str(engine.port),
            "--served-model-name", MODEL_NAME,
            "--dtype", DTYPE,
            "--enforce-eager",
            "--distributed-executor-backend", "uni",
            "--block-size", str(BLOCK_SIZE_TOKENS),
            "--max-model-len", str(MAX_MODEL_LEN_TOKENS),
            "--max-num-batched-tokens", str(MAX_MODEL_LEN_TOKENS),
            "--max-num-seqs", "8",
            "--kv-cache-memory-bytes", str(KV_CACHE_BYTES),
            "--prefix-caching-hash-algo", "sha256_cbor",
            "--kv-events-config", json.dumps(events),
        ]  # fmt: skip
        if setup == SHARED:
            connector = {
                "kv_connector": "MooncakeSuiteConnector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"store_address": f"127.0.0.1:{self._store_port}"},
            }
            command += ["--kv-transfer-config", json.dumps(connector)]
        return command

    def router_flags(self, setup: str, policy: str, config: Path) -> list[str]:
        """The store's events come over a Unix socket, which has no host: so it counts as one on another host,
        whose blocks are nobody's own and can be fetched by all."""
        urls = [engine.url for engine in self.engines[setup]]
        flags = ["--config", str(config), "--worker-urls", *urls, "--policy", policy]
        flags += ["--tokenizer-path", str(self._model), "--block-size", str(BLOCK_SIZE_TOKENS)]
        for engine in self.engines[setup]:
            events = f"{engine.url}={self._events(engine.name)},{self._replay(engine.name)}"
            flags += ["--kv-events", events]
        if setup == SHARED:
            flags += ["--store-kv-events", f"{self._events('store')},{self._replay('store')}"]
        return flags

    def forget_prefixes(self, setup: str) -> None:
        for engine in self.engines[setup]:
            request = urllib.request.Request(f"{engine.url}/reset_prefix_cache", b"", method="POST")
            urllib.request.urlopen(request, timeout=60).close()

    def counted(self, setup: str) -> tuple[float, float]:
        """Tokens so far that both engines had cached, and that they fetched."""
        cached = fetched = 0.0
        for engine in self.engines[setup]:
            with urllib.request.urlopen(f"{engine.url}/metrics", timeout=60) as answer:
                text = answer.read().decode()
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    cached += sample.value if sample.name == _CACHED else 0.0
                    fetched += sample.value if sample.name == _FETCHED else 0.0
        return cached, fetched

    def _events(self, name: str) -> str:
        return f"ipc://{self._sockets}/{name}"

    def _replay(self, name: str) -> str:
        return f"ipc://{self._sockets}/{name}-replay"


def _script(name: str) -> str:
    return str(Path(sys.executable).parent / name)
