"""HTTP for operators: /health, /ready, /metrics (Prometheus) and /stats (JSON)."""

from collections.abc import Callable, Iterator

from aiohttp import web
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvcore.metrics import STORE_PREFIX

_TOTAL = "_total"
_TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"


class StatsCollector(Collector):
    """Turns the store's numbers into metrics when they are asked for; nothing is counted twice."""

    def __init__(self, stats: Callable[[], dict[str, float]]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        for name, value in self._stats().items():
            text = name.removesuffix(_TOTAL).replace("_", " ")
            if name.endswith(_TOTAL):
                yield CounterMetricFamily(STORE_PREFIX + name, text, value=value)
            else:
                yield GaugeMetricFamily(STORE_PREFIX + name, text, value=value)


class Admin:
    """`stats` gives the numbers, `state` is "ready" while the store takes part in everything. Runs in the
    store's loop: an answer costs well under a millisecond."""

    def __init__(self, stats: Callable[[], dict[str, float]], state: Callable[[], str]) -> None:
        self._stats = stats
        self._state = state
        self._registry = CollectorRegistry()
        self._registry.register(StatsCollector(stats))
        ProcessCollector(registry=self._registry)
        app = web.Application()
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/ready", self._ready),
                web.get("/metrics", self._metrics),
                web.get("/stats", self._stats_json),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None)
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        """Listens; `port` 0 takes a free one, to be found in `self.port`. OSError when it cannot."""
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _ready(self, request: web.Request) -> web.Response:
        state = self._state()
        return web.json_response({"status": state}, status=200 if state == "ready" else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        body = generate_latest(self._registry)
        return web.Response(body=body, headers={"Content-Type": _TEXT_FORMAT})

    async def _stats_json(self, request: web.Request) -> web.Response:
        return web.json_response(self._stats())
