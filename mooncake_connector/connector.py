"""`MooncakeSuiteConnector`: vLLM's KVConnectorBase_V1 on top of SchedulerSide and WorkerSide.

Only delegates. Nothing raises into an engine step: each hook is guarded, and what it falls back to means
"nothing was loaded or saved". Errors in the configuration do raise, before the engine serves anything.

vLLM: --kv-transfer-config '{"kv_connector": "MooncakeSuiteConnector", "kv_role": "kv_both",
      "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"store_address": "host:50051"}}'
"""

from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)

from kvcore.client.sync_client import StoreClient
from kvcore.errors import ConfigError
from mooncake_connector import compat
from mooncake_connector.config import ConnectorConfig, connector_config
from mooncake_connector.log import get_logger
from mooncake_connector.metadata import LoadMode, RankAnswer, StepPlan
from mooncake_connector.scheduler_side import SchedulerSide
from mooncake_connector.stats import SuiteConnectorStats, SuitePromMetrics
from mooncake_connector.tensors import open_kv_memory
from mooncake_connector.worker_side import WorkerSide

logger = get_logger(__name__)


class SuiteMetadata(KVConnectorMetadata):
    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan


class SuiteHandshake(KVConnectorHandshakeMetadata):
    def __init__(self, answer: RankAnswer) -> None:
        self.answer = answer


class SuiteWorkerMetadata(KVConnectorWorkerMetadata):
    def __init__(self, answers: list[RankAnswer]) -> None:
        self.answers = answers

    def aggregate(self, other: "SuiteWorkerMetadata") -> "SuiteWorkerMetadata":
        return SuiteWorkerMetadata(self.answers + other.answers)


class MooncakeSuiteConnector(KVConnectorBase_V1):
    """Not SupportsHMA on purpose: vLLM then keeps one KV cache group in which every block lives as long as
    its request, and that is what can be shared by hash. Models that need several groups, or none, are
    refused at the start."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        compat.check_has_one_group(kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._config = connector_config(transfer.kv_connector_extra_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        layer_hooks = compat.layers_run_once(vllm_config)
        if role == KVConnectorRole.SCHEDULER:
            if not compat.recomputes_failed_loads(transfer):
                logger.error(
                    'kv_load_failure_policy is not "recompute": requests whose KV the store has lost '
                    "meanwhile will end with an error instead of being computed here"
                )
            wants_sync = self._config.load_mode == "sync" and layer_hooks
            sync = wants_sync and compat.failed_loads_stay_local(vllm_config)
            if wants_sync and not sync:
                logger.warning(
                    "load_mode sync needs one rank and no asynchronous scheduling: loads are asynchronous"
                )
            self._scheduler = SchedulerSide(
                self._config,
                lambda: _make_store(self._config, f"{transfer.engine_id}/scheduler", moves_blocks=False),
                compat.block_size_tokens(vllm_config, kv_cache_config),
                loads=transfer.is_kv_consumer,
                saves=transfer.is_kv_producer,
                load_mode=LoadMode.SYNC if sync else LoadMode.ASYNC,
                media_are_named=compat.media_are_named(vllm_config),
            )
        else:
            self._worker = WorkerSide(
                self._config,
                lambda: _make_store(self._config, f"{transfer.engine_id}/worker", moves_blocks=True),
                layer_hooks=layer_hooks,
            )

    # ---- class level

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return True

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Any will do. vLLM asks before it makes groups of layers, where it would fail for want of its hybrid
        cache manager without saying whose fault that is."""
        compat.check_has_no_recurrent_layers(vllm_config)
        return None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> SuiteConnectorStats:
        return SuiteConnectorStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> SuitePromMetrics:
        return SuitePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is lost is a later miss: vLLM need not recompute preempted requests for our sake."""
        return False

    # ---- worker side

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        worker = self._worker_side()
        try:
            compat.check_supported(self._vllm_config, self._kv_cache_config)
        except ConfigError as error:
            worker.disable(str(error))
            return
        worker.register(
            lambda: open_kv_memory(kv_caches, self._kv_cache_config.num_blocks, self._config),
            lambda: compat.engine_facts(self._vllm_config, self._kv_cache_config, kv_caches),
        )

    def get_handshake_metadata(self) -> SuiteHandshake:
        return SuiteHandshake(self._worker_side().answer)

    def bind_connector_metadata(self, connector_metadata: SuiteMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        worker = self._worker_side()
        worker.guard.call(None, worker.begin_step, connector_metadata.plan)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        worker = self._worker_side()
        worker.guard.call(None, worker.start_loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        worker = self._worker_side()
        worker.guard.call(None, worker.wait_layer, layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        worker = self._worker_side()
        worker.guard.call(None, worker.save_layer, layer_name)

    def wait_for_save(self) -> None:
        worker = self._worker_side()
        worker.guard.call(None, worker.end_step)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        worker = self._worker_side()
        return None, worker.guard.call(set(), worker.take_finished, finished_req_ids) or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Used in all versions: unlike failed_recving (0.30+) it keeps blocks before the first lost one."""
        worker = self._worker_side()
        return worker.guard.call(set(), worker.take_failed_blocks)

    def build_connector_worker_meta(self) -> SuiteWorkerMetadata | None:
        answer = self._worker_side().asked_answer()
        return None if answer is None else SuiteWorkerMetadata([answer])

    # ---- scheduler side

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], Any]) -> None:
        """A MultiConnector hands over one child's metadata for all: what is not ours is left alone, and the
        ranks answer with the first step instead."""
        answers = [each.answer for each in metadata.values() if isinstance(each, SuiteHandshake)]
        self._scheduler_side().connect(answers)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._scheduler_side().evict_from_prefix_cache = lambda block_ids: compat.evict_from_prefix_cache(
            gpu_block_pool, block_ids
        )

    def on_new_request(self, request: Any) -> None:
        scheduler = self._scheduler_side()
        scheduler.guard.call(None, scheduler.on_new_request, request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        scheduler = self._scheduler_side()
        nothing: tuple[int | None, bool] = (0, False)
        return scheduler.guard.call(nothing, scheduler.match, request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        scheduler = self._scheduler_side()
        block_ids = blocks.get_block_ids()[0]
        scheduler.guard.call(None, scheduler.update_after_alloc, request, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> SuiteMetadata:
        return SuiteMetadata(self._scheduler_side().build_plan(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        scheduler = self._scheduler_side()
        answered = connector_output.kv_connector_worker_meta
        if isinstance(answered, SuiteWorkerMetadata):
            scheduler.guard.call(None, scheduler.connect, answered.answers)
        scheduler.guard.call(None, scheduler.update_output, connector_output.invalid_block_ids)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Blocks are free at once: what is on its way to the store was copied."""
        scheduler = self._scheduler_side()
        return False, scheduler.guard.call(None, scheduler.request_finished, request)

    # ---- both

    def get_kv_connector_stats(self) -> SuiteConnectorStats | None:
        side = self._worker or self._scheduler_side()
        counted = side.counters.take()
        return SuiteConnectorStats(data=counted) if counted else None

    def reset_cache(self) -> bool:
        """What is in the store belongs to all engines and stays; this one does not look at it any more."""
        scheduler = self._scheduler_side()
        return scheduler.guard.call(False, scheduler.reset)

    def shutdown(self) -> None:
        for side in (self._worker, self._scheduler):
            if side is not None:
                side.guard.call(None, side.shutdown)

    def _worker_side(self) -> WorkerSide:
        assert self._worker is not None, "a worker hook was called on the scheduler's connector"
        return self._worker

    def _scheduler_side(self) -> SchedulerSide:
        assert self._scheduler is not None, "a scheduler hook was called on a worker's connector"
        return self._scheduler


def _make_store(config: ConnectorConfig, name: str, *, moves_blocks: bool) -> StoreClient:
    """Waits for the first attempt, so that a store that refuses us is named; one that is not there is not."""
    options = config.client_options()
    if not moves_blocks:
        # Who only asks has no use for queue pairs, nor for the pool: mapped twice, it counts twice when the
        # kernel, out of memory, looks for the largest process to end.
        options["planes"] = ("tcp",)
    return StoreClient.connect(config.store_address, client_name=name, **options)
