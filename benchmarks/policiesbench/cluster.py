"""The engines, the store and the routers of the policy benchmark: commands, and what engines count."""

import json
import sys
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from demo_lib.cluster import BLOCK_SIZE_TOKENS, ENGINE_ENV, vllm_command
from demo_lib.processes import Processes, free_ports
from prometheus_client.parser import text_string_to_metric_families

from policiesbench.cells import LOCAL, SHARED, SPLIT, Cell
from policiesbench.workload import Plan

ENGINE_ENVIRONMENT = {**ENGINE_ENV, "VLLM_SERVER_DEV_MODE": "1"}  # /reset_prefix_cache
# Nobody compares tokens here, and half the computation makes twice as many requests.
DTYPE, _BYTES_OF_DTYPE = "bfloat16", 2
_QUESTION_TOKENS = 128  # at most, with the head of a document
_CACHED = "vllm:prefix_cache_hits_total"
_FETCHED = "vllm:external_prefix_cache_hits_total"
_START_TIMEOUT_S = 600.0
_ROUTER_TIMEOUT_S = 60.0


class Model(NamedTuple):
    """`bytes_per_token`: of the text, about."""

    path: Path
    bytes_per_token: float

    def document_tokens(self, plan: Plan) -> int:
        return round(plan.document_bytes / self.bytes_per_token)

    @property
    def kv_bytes_per_token(self) -> int:
        shape = json.loads((self.path / "config.json").read_text())
        head_dim = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
        return int(2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * head_dim * _BYTES_OF_DTYPE)


class Engine(NamedTuple):
    name: str
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


class Cluster:
    """Two engines for each kind that `cells` name, and a router for each cell, which all run throughout.
    `sockets`: a folder with a short path, for KV events."""

    def __init__(
        self, processes: Processes, model: Model, plan: Plan, cells: Iterable[Cell], sockets: Path
    ) -> None:
        self._processes, self._model, self._plan, self._sockets = processes, model, plan, sockets
        self._cells = tuple(cells)
        kinds = [kind for kind in (LOCAL, SHARED) if any(cell.engines == kind for cell in self._cells)]
        ports = free_ports(2 + 2 * len(kinds) + len(self._cells))
        self._store_port, self._store_admin = ports.pop(), ports.pop()
        self.engines = {
            kind: [Engine(f"{'local' if kind == LOCAL else 'shared'}-{i}", ports.pop()) for i in range(2)]
            for kind in kinds
        }
        self._router_ports = dict(zip(self._cells, ports, strict=True))

    @property
    def first_engine(self) -> Engine:
        return next(iter(self.engines.values()))[0]

    def urls(self) -> list[str]:
        """Of every engine and every router."""
        engines = [engine.url for engines in self.engines.values() for engine in engines]
        return [*engines, *map(self.router_url, self._cells)]

    def router_url(self, cell: Cell) -> str:
        return f"http://127.0.0.1:{self._router_ports[cell]}"

    def start_engines(self) -> None:
        """And the store. DemoError when anything does not come up."""
        if SHARED in self.engines:
            self._start_store()
        urls = {}
        for kind, engines in self.engines.items():
            for engine in engines:
                self._processes.start(engine.name, self._vllm(engine, kind), ENGINE_ENVIRONMENT)
                urls[engine.name] = f"{engine.url}/health"
        self._processes.wait_until_ready(urls, _START_TIMEOUT_S, lambda name: None)

    def start_routers(self, config: Path) -> None:
        """DemoError when one does not come up."""
        urls = {}
        for number, cell in enumerate(self._cells):
            port = str(self._router_ports[cell])
            command = [sys.executable, "-m", "router.cli", "--port", port, "--log-level", "warning"]
            name = f"router-{number}"
            self._processes.start(name, [*command, *self.router_flags(cell, config)], {})
            urls[name] = f"{self.router_url(cell)}/ready"
        self._processes.wait_until_ready(urls, _ROUTER_TIMEOUT_S, lambda name: None)

    def _start_store(self) -> None:
        command = [_script("mooncake-store"), "serve", "--host", "127.0.0.1"]
        command += ["--port", str(self._store_port), "--admin-port", str(self._store_admin)]
        command += ["--pool-size-bytes", "2gb"]
        command += ["--events.endpoint", self._events("store")]
        command += ["--events.replay-endpoint", self._replay("store")]
        self._processes.start("store", command, {})
        url = f"http://127.0.0.1:{self._store_admin}/ready"
        self._processes.wait_until_ready({"store": url}, _START_TIMEOUT_S, lambda name: None)

    def _vllm(self, engine: Engine, kind: str) -> list[str]:
        document_tokens = self._model.document_tokens(self._plan) + _QUESTION_TOKENS
        longest = document_tokens + self._plan.max_tokens
        longest = -(-longest // BLOCK_SIZE_TOKENS) * BLOCK_SIZE_TOKENS
        cache_bytes = self._plan.cached_documents * longest * self._model.kv_bytes_per_token
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self._events(engine.name),
            "replay_endpoint": self._replay(engine.name),
        }
        command = vllm_command(
            self._model.path,
            engine.port,
            dtype=DTYPE,
            max_model_len_tokens=longest,
            max_step_tokens=longest,  # about one prompt a step, as the router takes it to be
            max_running=self._plan.max_running,
            kv_cache_bytes=int(cache_bytes),
        )
        command += ["--kv-events-config", json.dumps(events)]
        if kind == SHARED:
            connector = {
                "kv_connector": "MooncakeSuiteConnector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"store_address": f"127.0.0.1:{self._store_port}"},
            }
            command += ["--kv-transfer-config", json.dumps(connector)]
        return command

    def router_flags(self, cell: Cell, config: Path) -> list[str]:
        """The store's events come over a Unix socket, which has no host: so it counts as one on another host,
        whose blocks are nobody's own and can be fetched by all."""
        engines = self.engines[cell.engines]
        first, second = (engine.url for engine in engines)
        flags = ["--config", str(config), "--policy", cell.policy]
        if cell.routed == SPLIT:
            flags += ["--prefill", first, "--decode", second, "--pd-protocol", "suite"]
        else:
            flags += ["--worker-urls", first, second]
        flags += ["--tokenizer-path", str(self._model.path), "--block-size", str(BLOCK_SIZE_TOKENS)]
        for engine in engines:
            events = f"{engine.url}={self._events(engine.name)},{self._replay(engine.name)}"
            flags += ["--kv-events", events]
        if cell.engines == SHARED:
            flags += ["--store-kv-events", f"{self._events('store')},{self._replay('store')}"]
        return flags

    def forget_prefixes(self, kind: str) -> None:
        for engine in self.engines[kind]:
            request = urllib.request.Request(f"{engine.url}/reset_prefix_cache", b"", method="POST")
            urllib.request.urlopen(request, timeout=60).close()

    def counted(self, cell: Cell) -> tuple[float, float]:
        """Prompt tokens so far that its engines had cached, and that they fetched. A decode engine is not
        asked: it fetches every prompt, and counts that as well."""
        cached = fetched = 0.0
        for engine in self.engines[cell.engines][: 1 if cell.routed == SPLIT else 2]:
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
