"""Asks engines how busy they are: what other clients and routers send them is seen nowhere else.

From the Prometheus text of vLLM (`vllm:num_requests_running`, `vllm:num_requests_waiting`,
`vllm:kv_cache_usage_perc`, `vllm:cache_config_info`) and SGLang (`sglang:num_running_reqs`,
`sglang:num_queue_reqs`, `sglang:num_used_tokens`, `sglang:max_total_num_tokens`; of its prefill and decode
engines also the queues in which a request waits for its partner and its KV). Data parallel ranks of one
engine are told apart where they are steered, else added up.
"""

import asyncio
import logging
import math
import re
from typing import Annotated

import msgspec
from msgspec import Meta

from router.cluster import Cluster
from router.core.load_report import LoadReport
from router.http.fetch import Probe, fetch
from router.instance import Instance
from router.instance_tasks import InstanceTasks

logger = logging.getLogger(__name__)

_SAMPLE = re.compile(
    rb"^(vllm:(?:num_requests_running|num_requests_waiting|kv_cache_usage_perc|cache_config_info)"
    rb"|sglang:(?:num_running_reqs|num_queue_reqs|num_used_tokens|max_total_num_tokens"
    rb"|num_prefill_bootstrap_queue_reqs|num_decode_prealloc_queue_reqs|num_decode_transfer_queue_reqs))"
    rb"(?:\{(.*)\})? ([0-9.eE+-]+)\s*$",
    re.MULTILINE,
)
# SGLang counts these apart from its queue.
_WAITING_FOR_A_PARTNER = (
    b"sglang:num_prefill_bootstrap_queue_reqs",
    b"sglang:num_decode_prealloc_queue_reqs",
    b"sglang:num_decode_transfer_queue_reqs",
)
_RANK = re.compile(rb',(?:engine|dp_rank)="(\d+)"')  # vLLM's label, SGLang's
_BLOCKS = re.compile(rb'num_gpu_blocks="(\d+)"')
_BLOCK_SIZE = re.compile(rb'[{,]block_size="(\d+)"')


class LoadConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    path: Annotated[str, Meta(pattern="^/", description="an engine's metrics, asked for its load")] = (
        "/metrics"
    )
    interval_ms: Annotated[
        float, Meta(ge=0, description="between two questions to one engine; 0 never asks")
    ] = 1_000
    timeout_ms: Annotated[float, Meta(gt=0, description="an answer later than this is not waited for")] = (
        5_000
    )


def parse_load(text: bytes, sampled_at: float, dp_rank: int | None = None) -> LoadReport | None:
    """Of one data parallel rank, or of all together. None when an engine's metrics do not say how many
    requests it has."""
    totals: dict[bytes, float] = {}
    ranks = 0
    for name, labels, value in _SAMPLE.findall(text):
        rank = _RANK.search(b"," + labels) if dp_rank is not None else None
        if rank is not None and int(rank[1]) != dp_rank:
            continue
        if name == b"vllm:cache_config_info":
            blocks, size = _BLOCKS.search(labels), _BLOCK_SIZE.search(b"," + labels)
            found = float(blocks[1]) * float(size[1]) if blocks and size else 0.0
        else:
            found = _number(value)
        ranks += name == b"vllm:kv_cache_usage_perc"
        totals[name] = totals.get(name, 0.0) + found
    running = totals.get(b"vllm:num_requests_running", totals.get(b"sglang:num_running_reqs"))
    waiting = totals.get(b"vllm:num_requests_waiting", totals.get(b"sglang:num_queue_reqs"))
    if running is None or waiting is None:
        return None
    waiting += sum(totals.get(name, 0.0) for name in _WAITING_FOR_A_PARTNER)
    capacity = totals.get(b"vllm:cache_config_info", totals.get(b"sglang:max_total_num_tokens", -1.0))
    used = totals.get(b"sglang:num_used_tokens", -1.0)
    if ranks and capacity > 0:
        used = totals[b"vllm:kv_cache_usage_perc"] / ranks * capacity
    return LoadReport(
        sampled_at=sampled_at,
        running_requests=int(running),
        waiting_requests=int(waiting),
        kv_used_tokens=int(used),
        kv_capacity_tokens=int(capacity) or -1,
    )


def _number(text: bytes) -> float:
    """0 for what is none, or none that can be counted with."""
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if math.isfinite(value) else 0.0


class LoadMonitor:
    """On the event loop's thread."""

    def __init__(self, cluster: Cluster, config: LoadConfig) -> None:
        self._cluster = cluster
        self.config = config
        self._tasks = InstanceTasks(self._ask_forever)

    def watch(self, *, wanted: bool) -> None:
        """To be called after each change of the cluster; `wanted`: somebody goes by loads."""
        asks = wanted and self.config.interval_ms
        self._tasks.follow(self._cluster.instances.values() if asks else ())

    async def close(self) -> None:
        await self._tasks.close()

    async def _ask_forever(self, instance: Instance) -> None:
        loop = asyncio.get_running_loop()
        probe = Probe(instance.pool)
        understood, rank = True, instance.spec.dp_rank
        while True:
            config, sampled_at = self.config, loop.time()
            fetched = await fetch(probe, config.path, timeout_s=config.timeout_ms / 1e3)
            report = parse_load(fetched.body, sampled_at, rank) if fetched.status == 200 else None
            if report is not None:
                self._cluster.book.polled(instance.url, report)
            elif understood and fetched.status:
                logger.warning(
                    "an engine's metrics say nothing of its load: only our own requests count",
                    extra={"instance": instance.url, "path": config.path, "status": fetched.status},
                )
            understood = report is not None or not fetched.status
            await asyncio.sleep(config.interval_ms / 1e3)
