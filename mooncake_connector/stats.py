"""Our counters on vLLM's road: worker -> scheduler -> API process -> log line and Prometheus.

Prometheus names are kvcore.metrics.CONNECTOR_PREFIX + counter, with vLLM's own labels (model_name, engine).
"""

from dataclasses import dataclass
from typing import Any

from prometheus_client import REGISTRY
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvcore import metrics

COUNTERS = {
    metrics.LOOKUPS_TOTAL: "Prefixes asked of the store",
    metrics.LOOKUP_TIMEOUTS_TOTAL: "Prefixes for which the store's answer came too late to be used",
    metrics.LOADED_BLOCKS_TOTAL: "KV blocks loaded from the store",
    metrics.LOADED_BYTES_TOTAL: "Bytes loaded from the store",
    metrics.LOAD_SECONDS_TOTAL: "Seconds spent in loads, summed over requests",
    metrics.LOADS_FAILED_TOTAL: "Loads of which at least one block did not come",
    metrics.LOAD_FAILED_BLOCKS_TOTAL: "KV blocks that did not come and were recomputed",
    metrics.SAVED_BLOCKS_TOTAL: "KV blocks saved to the store",
    metrics.SAVED_BYTES_TOTAL: "Bytes saved to the store",
    metrics.SAVE_SKIPPED_PRESENT_TOTAL: "KV blocks not saved because the store has them already",
    metrics.SAVE_SKIPPED_FULL_TOTAL: "KV blocks not saved because the store had no room",
    metrics.SAVE_SKIPPED_STAGING_TOTAL: "KV blocks not saved because layers came faster than they left",
    metrics.SAVE_FAILED_BLOCKS_TOTAL: "KV blocks not saved because the store went away or refused them",
    metrics.HOOK_ERRORS_TOTAL: "Unexpected errors kept out of the engine's step",
}


@dataclass
class SuiteConnectorStats(KVConnectorStats):
    """data: counter name -> increase since the last report."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, increase in other.data.items():
            self.data[name] = self.data.get(name, 0) + increase
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name: round(self.data[name], 3) for name in COUNTERS if self.data.get(name)}

    def is_empty(self) -> bool:
        return not self.data


class SuitePromMetrics(KVConnectorPromMetrics):
    """One Prometheus counter a name; made anew when a second engine starts in the same process."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[str, dict[int, Any]] = {}
        for name, documentation in COUNTERS.items():
            full_name = metrics.CONNECTOR_PREFIX + name
            _unregister(full_name)
            family = self._counter_cls(name=full_name, documentation=documentation, labelnames=labelnames)
            self._counters[name] = {
                engine: family.labels(*values) for engine, values in per_engine_labelvalues.items()
            }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, increase in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(increase)


def _unregister(full_name: str) -> None:
    """vLLM clears only collectors of its own name space before it registers them again."""
    collector = getattr(REGISTRY, "_names_to_collectors", {}).get(full_name)
    if collector is not None:
        REGISTRY.unregister(collector)
