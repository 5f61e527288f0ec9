"""What the router counts. Plain integers on the hot path, turned into Prometheus families only at a scrape.

`prometheus_client`'s own counters take a lock and cost about 1 us an event; a request has five of them.
"""

import bisect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from kvcore import metrics as names
from router.cluster import Cluster
from router.core.view import InstanceState
from router.instance import Instance
from router.instance_spec import Health

# Only known paths become labels: a client must not be able to make time series.
_PATH_LABELS = {
    path.encode(): path
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/models", "/v1/responses")
}
_STATUS_LABELS = tuple(f"{hundreds}xx" for hundreds in range(10))
_TTFT_SECONDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0),
)
_TBT_SECONDS = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0),
)
_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Histogram:
    """`bounds` are the upper ends of its buckets, rising; one more has no end."""

    def __init__(self, bounds: tuple[float, ...] = _SECONDS) -> None:
        self.bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect.bisect_left(self.bounds, value)] += 1
        self._sum += value

    @property
    def counts(self) -> tuple[int, ...]:
        """Observations so far, by bucket."""
        return tuple(self._counts)

    def family(self, name: str, text: str) -> Metric:
        cumulative, buckets = 0, []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self._counts, strict=True):
            cumulative += count
            buckets.append((bound, cumulative))
        return HistogramMetricFamily(name, text, buckets=buckets, sum_value=self._sum)


class RouterMetrics:
    """One a router; written and scraped on the event loop's thread."""

    def __init__(self) -> None:
        self.active_requests = 0
        self.client_connections = 0
        self.requests: Counter[tuple[str, int]] = Counter()
        self.refusals: Counter[int] = Counter()
        self.rejections: Counter[str] = Counter()
        self.holds = 0
        self.retries: Counter[tuple[str, str]] = Counter()
        self.legs: Counter[tuple[str, str]] = Counter()
        self.decode_only = 0
        self.transfers: Counter[str] = Counter()
        self.clients_gone = 0
        self.duration = Histogram()
        self.first_byte = Histogram()
        self.ttft = Histogram(_TTFT_SECONDS)
        self.tbt = Histogram(_TBT_SECONDS)
        self.slo_answers: Counter[tuple[str, str]] = Counter()
        self.prompt_tokens = 0
        self.prefix_hit_tokens = 0

    def first_token(self, seconds: float, slo_ms: float) -> None:
        """Of a streamed answer, since its request came; `slo_ms` 0: there is none."""
        self.ttft.observe(seconds)
        if slo_ms:
            self.slo_answers["ttft", "met" if seconds * 1e3 <= slo_ms else "missed"] += 1

    def streamed(self, seconds: float, num_tokens: int, slo_ms: float) -> None:
        """A streamed answer is complete, `seconds` after its first token. Counts its mean time between
        tokens: single ones say more of how engines batch their writes than of what a reader sees."""
        if num_tokens < 2:
            return
        tbt = seconds / (num_tokens - 1)
        self.tbt.observe(tbt)
        if slo_ms:
            self.slo_answers["tbt", "met" if tbt * 1e3 <= slo_ms else "missed"] += 1

    def finished(self, path: bytes, status: int, started_at: float, first_byte_at: float, now: float) -> None:
        """One request is over. Times are seconds of the event loop's clock; first_byte_at 0: none came."""
        self.active_requests -= 1
        self.requests[_PATH_LABELS.get(path, "other"), status] += 1
        self.duration.observe(now - started_at)
        if first_byte_at:
            self.first_byte.observe(first_byte_at - started_at)

    def leg_over(self, instance: Instance | None, outcome: str | int) -> None:
        """`outcome`: a status, or "lost", "cancelled", "timeout"."""
        if instance is not None:
            label = outcome if isinstance(outcome, str) else _STATUS_LABELS[outcome // 100]
            self.legs[instance.role_name, label] += 1

    def prompts(self, counts: Counter[str]) -> Metric:
        family = CounterMetricFamily(
            names.ROUTER_PREFIX + names.PROMPTS_TOTAL, "prompts read, by how", labels=["how"]
        )
        for how, count in counts.items():
            family.add_metric([how], count)
        return family

    def store_blocks(self, prefetched: Counter[str], copied: Counter[str]) -> Iterator[Metric]:
        """What stores were asked to do for prefixes to be transferred."""
        for name, text, counts in (
            (names.PREFETCHED_BLOCKS_TOTAL, "bring from disk", prefetched),
            (names.COPIED_BLOCKS_TOTAL, "copy from another store", copied),
        ):
            text = f"blocks of prefixes to be transferred that stores were asked to {text}, by outcome"
            family = CounterMetricFamily(names.ROUTER_PREFIX + name, text, labels=["outcome"])
            for outcome, count in counts.items():
                family.add_metric([outcome], count)
            yield family

    def families(self, cluster: Cluster, now: float) -> Iterator[Metric]:
        """Everything but the prompts and the index; `now`: of the event loop's clock."""

        def counter(
            name: str, text: str, labels: tuple[str, ...], values: Iterable[tuple[object, int]]
        ) -> Metric:
            family = CounterMetricFamily(names.ROUTER_PREFIX + name, text, labels=labels)
            for key, value in values:
                family.add_metric([str(part) for part in (key if isinstance(key, tuple) else (key,))], value)
            return family

        def gauge(
            name: str,
            text: str,
            values: Iterable[tuple[tuple[str, ...], float]],
            labels: tuple[str, ...] = (),
        ) -> Metric:
            family = GaugeMetricFamily(names.ROUTER_PREFIX + name, text, labels=labels)
            for key, value in values:
                family.add_metric(key, value)
            return family

        yield counter(
            names.REQUESTS_TOTAL, "requests answered, by status", ("path", "status"), self.requests.items()
        )
        yield counter(
            names.REFUSALS_TOTAL,
            "requests that could not be parsed or admitted",
            ("status",),
            self.refusals.items(),
        )
        yield counter(
            names.REJECTIONS_TOTAL, "requests rejected by scheduling", ("reason",), self.rejections.items()
        )
        yield counter(
            names.HOLDS_TOTAL, "times requests were held to be scheduled later", (), [((), self.holds)]
        )
        yield counter(
            names.RETRIES_TOTAL,
            "legs sent again to another instance",
            ("leg", "reason"),
            self.retries.items(),
        )
        yield counter(
            names.LEGS_TOTAL,
            "requests sent to instances, by how they ended",
            ("role", "outcome"),
            self.legs.items(),
        )
        yield counter(
            names.DECODE_ONLY_TOTAL,
            "requests whose decode instance did the prefill too",
            (),
            [((), self.decode_only)],
        )
        yield counter(
            names.PREFIX_TRANSFERS_TOTAL,
            "prefixes that Algorithm 1 had fetched from somebody who holds more of them",
            ("source",),
            self.transfers.items(),
        )
        yield counter(
            names.CLIENTS_GONE_TOTAL,
            "clients that left before their answer was complete",
            (),
            [((), self.clients_gone)],
        )
        yield self.duration.family(names.ROUTER_PREFIX + names.REQUEST_SECONDS, "whole requests")
        yield self.first_byte.family(
            names.ROUTER_PREFIX + names.FIRST_BYTE_SECONDS, "until the first byte from an engine"
        )
        yield self.ttft.family(names.ROUTER_PREFIX + names.TTFT_SECONDS, "streams, until the first token")
        yield self.tbt.family(
            names.ROUTER_PREFIX + names.TBT_SECONDS, "streams, mean time between tokens of each"
        )
        yield counter(
            names.SLO_ANSWERS_TOTAL,
            "streamed answers that had an SLO, by whether it was met",
            ("slo", "outcome"),
            self.slo_answers.items(),
        )
        yield counter(
            names.PROMPT_TOKENS_TOTAL, "tokens of prompts that were read", (), [((), self.prompt_tokens)]
        )
        yield counter(
            names.PREFIX_HIT_TOKENS_TOTAL,
            "those of them that need not be computed, by what the index knew",
            (),
            [((), self.prefix_hit_tokens)],
        )
        yield gauge(names.ACTIVE_REQUESTS, "requests being answered", [((), self.active_requests)])
        yield gauge(names.CLIENT_CONNECTIONS, "open client connections", [((), self.client_connections)])
        instances = [((i.url, i.role.value), i) for i in cluster.instances.values()]
        labels = ("engine", "role")
        yield gauge(
            names.INSTANCE_IN_FLIGHT,
            "requests of this router on an instance",
            [(k, i.in_flight) for k, i in instances],
            labels,
        )
        yield gauge(
            names.INSTANCE_UP, "1: healthy", [(k, i.health is Health.UP) for k, i in instances], labels
        )
        yield gauge(
            names.INSTANCE_BREAKER_OPEN,
            "1: kept out after failures",
            [(k, not i.breaker.is_closed) for k, i in instances],
            labels,
        )
        yield gauge(
            names.INSTANCE_CONNECTIONS,
            "open connections to an instance",
            [(k, i.pool.num_open) for k, i in instances],
            labels,
        )
        states = cluster.book.look(now)
        of_instances: tuple[tuple[str, str, Callable[[InstanceState], float]], ...] = (
            (
                names.INSTANCE_QUEUE_SECONDS,
                "predicted time until a prefill sent now would begin",
                lambda state: state.queue_ms(now) / 1e3,
            ),
            (
                names.INSTANCE_FOREIGN_REQUESTS,
                "requests others sent, as of the last poll",
                lambda state: state.foreign_requests,
            ),
            (
                names.INSTANCE_KV_USED_TOKENS,
                "tokens its requests hold or will hold",
                lambda state: state.kv_used_tokens,
            ),
            (
                names.INSTANCE_KV_CAPACITY_TOKENS,
                "tokens its KV cache has room for; 0: not known",
                lambda state: state.kv_capacity_tokens,
            ),
        )
        for name, text, value_of in of_instances:
            yield gauge(name, text, [(k, value_of(states[k[0]])) for k, _ in instances], labels)


class _Collector:
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def exposition(families: Iterable[Metric]) -> bytes:
    """The Prometheus text format, with what this process takes of the machine."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(families))
    ProcessCollector(registry=registry)
    return generate_latest(registry)
