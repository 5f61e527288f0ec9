"""The prefix index and its feeds as Prometheus families."""

from collections.abc import Iterator

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from kvcore import metrics as names
from router.core.prefix_index import PrefixIndex
from router.kv_events.reader import EventReader


def index_families(index: PrefixIndex) -> Iterator[Metric]:
    prefix = names.ROUTER_PREFIX
    yield GaugeMetricFamily(prefix + names.INDEX_BLOCKS, "blocks in the index", index.table.num_blocks)
    yield GaugeMetricFamily(prefix + names.INDEX_SIZE_BYTES, "upper bound of its memory", index.size_bytes)
    events = CounterMetricFamily(
        prefix + names.INDEX_EVENTS_TOTAL, "what KV events brought, by what became of it", labels=["outcome"]
    )
    for outcome, count in msgspec.structs.asdict(index.stats).items():
        events.add_metric([outcome], count)
    yield events


def feed_families(events: EventReader) -> Iterator[Metric]:
    prefix = names.ROUTER_PREFIX
    batches = CounterMetricFamily(
        prefix + names.KV_EVENT_BATCHES_TOTAL, "batches of KV events applied", labels=["publisher"]
    )
    troubles = CounterMetricFamily(
        prefix + names.KV_EVENT_TROUBLES_TOTAL,
        "gaps closed by replay, publishers started anew, losses, what could not be read",
        labels=["publisher", "kind"],
    )
    for publisher, subscriber in events.subscribers():
        counts = msgspec.structs.asdict(subscriber.feed.stats)
        batches.add_metric([publisher], counts.pop("batches"))
        for kind, count in counts.items():
            troubles.add_metric([publisher, kind], count)
        troubles.add_metric([publisher, "malformed"], subscriber.num_malformed)
    yield batches
    yield troubles
