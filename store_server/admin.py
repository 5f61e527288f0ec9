"""HTTP for operators: /health, /ready, /metrics (Prometheus) and /stats (JSON)."""

from collections.abc import Callable, Iterator

from aiohttp import web
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from kvcore import __version__
from kvcore.metrics import REQUESTS_TOTAL, STORE_PREFIX, TENANT_PREFIX
from store_server.metric_help import HELP

Numbers = Callable[[], dict[str, float]]

_TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"


class StatsCollector(Collector):
    """Turns the store's numbers into metrics when they are asked for; nothing is counted twice."""

    def __init__(
        self,
        stats: Numbers,
        requests_by_type: Numbers,
        stats_by_tenant: Callable[[], dict[str, dict[str, float]]],
    ) -> None:
        self._stats = stats
        self._requests_by_type = requests_by_type
        self._stats_by_tenant = stats_by_tenant

    def collect(self) -> Iterator[Metric]:
        for name, value in self._stats().items():
            text = HELP.get(name, name)
            if name == REQUESTS_TOTAL:
                requests = CounterMetricFamily(STORE_PREFIX + name, text, labels=["type"])
                for kind, count in sorted(self._requests_by_type().items()):
                    requests.add_metric([kind], count)
                yield requests
            elif name.endswith("_total"):
                yield CounterMetricFamily(STORE_PREFIX + name, text, value=value)
            else:
                yield GaugeMetricFamily(STORE_PREFIX + name, text, value=value)
        families: dict[str, GaugeMetricFamily] = {}
        for tenant, values in self._stats_by_tenant().items():
            for name, value in values.items():
                if name not in families:
                    full_name = STORE_PREFIX + TENANT_PREFIX + name
                    families[name] = GaugeMetricFamily(
                        full_name, f"of one tenant: {HELP.get(name, name)}", labels=["tenant"]
                    )
                families[name].add_metric([tenant], value)
        yield from families.values()
        yield InfoMetricFamily(STORE_PREFIX + "build", "version of the store", {"version": __version__})


class Admin:
    """`stats` gives the numbers, `state` is "ready" while the store takes part in everything. Runs in the
    store's loop: an answer costs well under a millisecond."""

    def __init__(
        self,
        stats: Numbers,
        requests_by_type: Numbers,
        stats_by_tenant: Callable[[], dict[str, dict[str, float]]],
        state: Callable[[], str],
    ) -> None:
        self._stats = stats
        self._state = state
        self._registry = CollectorRegistry()
        self._registry.register(StatsCollector(stats, requests_by_type, stats_by_tenant))
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
