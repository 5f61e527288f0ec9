"""SGLang's prefill and decode engines with a router in front of them, and one SGLang that does both."""

import contextlib
import http.client
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.engine.packages import MOONCAKE_ENVIRONMENT, mooncake_transfer_engine
from tests.engine.rig import ROOT, StoreProcess, free_port
from tests.engine.served import Server, ended, router_server
from tests.engine.sglang.server import SglangServer, hicache_flags, suite_config, wait_until

COMPLETIONS = "/v1/completions"
# In SGLang's metrics: what it holds for requests that have not ended.
BUSY = (
    "sglang:num_running_reqs",
    "sglang:num_queue_reqs",
    "sglang:num_used_tokens",
    "sglang:num_prefill_bootstrap_queue_reqs",
    "sglang:num_prefill_inflight_queue_reqs",
    "sglang:num_decode_prealloc_queue_reqs",
    "sglang:num_decode_transfer_queue_reqs",
)


class Cluster(NamedTuple):
    """`alone` is no part of it: what one engine answers is right."""

    start_prefill: Callable[[], SglangServer]
    prefill: SglangServer
    decodes: tuple[SglangServer, SglangServer]
    alone: SglangServer
    router: Server

    def in_flight(self, engine: SglangServer) -> float:
        """Requests that the router has sent to it, and that have not ended."""
        return self.router.metric(f'mooncake_router_instance_in_flight{{engine="{url_of(engine)}"')

    def decoding(self) -> SglangServer:
        """The decode engine that has a request, as soon as the other has none."""
        found: list[SglangServer] = []

        def is_one() -> bool:
            found[:] = [engine for engine in self.decodes if self.in_flight(engine)]
            return len(found) == 1

        wait_until(is_one, lambda: self.router.get("/metrics"))
        return found[0]

    def wait_nothing_in_flight(self, *engines: SglangServer) -> None:
        """The router lets go of a request when its last leg has ended, which may be after its answer."""
        wait_until(lambda: not any(map(self.in_flight, engines)), lambda: self.router.get("/metrics"))

    def open_stream(
        self, body: dict[str, Any]
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Once it has begun."""
        connection = http.client.HTTPConnection(self.router.url.removeprefix("http://"), timeout=240)
        connection.request("POST", COMPLETIONS, json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200 and response.read(16)
        return connection, response


def url_of(engine: SglangServer) -> str:
    return f"http://127.0.0.1:{engine.port}"


def busy(engine: SglangServer) -> dict[str, float]:
    metrics = engine.metrics()
    return {name: metrics[name] for name in BUSY if metrics.get(name)}


@contextlib.contextmanager
def cluster_of(directory: Path, model: str, store: StoreProcess) -> Iterator[Cluster]:
    """One prefill engine that keeps its pages in `store`, two decode engines."""
    prefill_port, bootstrap_port = free_port(), str(free_port())
    environment = {
        **MOONCAKE_ENVIRONMENT,
        "PYTHONPATH": os.pathsep.join(map(str, (mooncake_transfer_engine(), ROOT))),
        "SGLANG_HOST_IP": "127.0.0.1",
        # Of prompts that wait for an engine that is dead; SGLang's default of 300 s is long for a test.
        "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "20",
    }
    # In float32: prompts that share a batch round differently, and no token may hang on that.
    plain = ("--dtype", "float32", "--disable-overlap-schedule")
    transfer = ("--disaggregation-transfer-backend", "mooncake")
    with contextlib.ExitStack() as stack:

        def start(*flags: str, port: int | None = None) -> SglangServer:
            server = SglangServer(directory, model, *plain, *flags, environment=environment, port=port)
            stack.callback(server.close)
            return server

        def start_prefill() -> SglangServer:
            return start(
                *("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", bootstrap_port),
                *transfer,
                *hicache_flags("page_first", "kernel", suite_config(store)),
                port=prefill_port,
            )

        prefill = start_prefill()
        first, second = (start("--disaggregation-mode", "decode", *transfer) for _ in range(2))
        alone = start()
        for server in (prefill, first, second, alone):
            server.wait_ready()
        router = router_server(
            directory / "router.log",
            *("--health.interval-ms", "500"),
            *("--pd-protocol", "sglang", "--prefill", url_of(prefill), bootstrap_port),
            *("--decode", url_of(first), "--decode", url_of(second)),
        )
        stack.enter_context(ended(router))
        router.wait("/ready")
        yield Cluster(start_prefill, prefill, (first, second), alone, router)
