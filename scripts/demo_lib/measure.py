"""Counters of the store and the engines, read before and after each request."""

import json
import time
import urllib.request
from collections.abc import Callable
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from demo_lib.cluster import Ports
from kvcore.metrics import LAYERS_READ_BEFORE_SEAL_TOTAL, READ_BYTES_TOTAL, WRITTEN_BYTES_TOTAL

ENGINES = ("prefill", "decode")
# vLLM's own counter: prompt tokens whose KV came from a connector instead of being computed.
EXTERNAL_HITS = "vllm:external_prefix_cache_hits_total"
QUIET_S = 0.3
SETTLE_TIMEOUT_S = 10.0


class Counters(NamedTuple):
    """Totals since start. `tokens_from_store` adds up both engines."""

    tokens_from_store: int
    bytes_read: int
    bytes_written: int
    layers_read_before_seal: int

    def since(self, before: "Counters") -> "Counters":
        return Counters(*(now - then for now, then in zip(self, before, strict=True)))


def read(ports: Ports) -> Counters:
    stats = json.loads(_get(f"{ports.url('store_admin')}/stats"))
    return Counters(
        sum(external_hits(ports.url(engine)) for engine in ENGINES),
        int(stats[READ_BYTES_TOTAL]),
        int(stats[WRITTEN_BYTES_TOTAL]),
        int(stats[LAYERS_READ_BEFORE_SEAL_TOTAL]),
    )


def read_settled(read_now: Callable[[], Counters]) -> Counters:
    """Saves go on after the answer: waits until nothing has changed for a moment, so that one request's
    bytes are not counted to the next and its work does not slow the next down."""
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    last = read_now()
    while time.monotonic() < deadline:
        time.sleep(QUIET_S)
        current = read_now()
        if current == last:
            break
        last = current
    return last


def external_hits(engine_url: str) -> int:
    """Prompt tokens of an engine so far that its connector loaded."""
    total = 0.0
    for family in text_string_to_metric_families(_get(f"{engine_url}/metrics")):
        for sample in family.samples:
            if sample.name == EXTERNAL_HITS:
                total += sample.value
    return int(total)


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        text: str = answer.read().decode()
        return text
