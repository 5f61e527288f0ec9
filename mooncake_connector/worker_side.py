"""The worker's half of the connector: one per rank, owns the KV bytes and the threads that move them.

Order of calls within a step is vLLM's (KVConnectorModelRunnerMixin): begin_step, [start_loads], for each
layer wait_layer and save_layer, [start_loads], end_step, take_finished, take_failed_blocks. With a draft
model (0.28 - 0.32) end_step comes last, after the draft's layers: what fails there is told one step late.
"""

from collections.abc import Callable, Sequence

from kvcore.client.base import LayerwiseStore
from kvcore.errors import KVError
from kvcore.guard import Guard
from kvcore.keys import block_keys, variant_namespace
from mooncake_connector.config import ConnectorConfig
from mooncake_connector.counters import Counters
from mooncake_connector.kv_memory import KVMemory
from mooncake_connector.loader import Loader
from mooncake_connector.log import get_logger
from mooncake_connector.metadata import RankAnswer, StepPlan
from mooncake_connector.namespace import EngineFacts, build_namespace
from mooncake_connector.saver import Saver
from mooncake_connector.staging import Staging
from mooncake_connector.tracing import LayerTrace

logger = get_logger(__name__)
# A step without tokens has nothing to do but wait for loads; longer would delay a request that arrives.
IDLE_STEP_WAIT_MS = 5.0


class WorkerSide:
    """All methods are called by the engine's thread; none waits for the store except `wait_layer`."""

    def __init__(
        self,
        config: ConnectorConfig,
        make_store: Callable[[], LayerwiseStore],
        *,
        layer_hooks: bool = True,
    ) -> None:
        """`layer_hooks` False: a hook may be called before its layer is complete, so layers are saved at the
        end of the step (and loads must be asynchronous)."""
        self.config = config
        self.counters = Counters()
        self.guard = Guard(logger, self.counters.add)
        self.answer = RankAnswer(reason="the KV cache has not been allocated yet")
        self._make_store = make_store
        self._layer_hooks = layer_hooks
        self._trace = LayerTrace(config.trace_path)
        self._plan = StepPlan()
        self._failed_blocks: set[int] = set()
        self._store: LayerwiseStore | None = None
        self._memory: KVMemory | None = None
        self._saver: Saver | None = None
        self._loader: Loader | None = None

    def register(self, memory: Callable[[], KVMemory], facts: Callable[[], EngineFacts]) -> None:
        """Takes the KV cache, which is kept as long as the engine lives.

        An engine that cannot share its KV goes on without us; the reason is logged and kept in `answer`.
        """
        try:
            self._start(memory(), facts())
        except (KVError, OSError, ValueError) as error:
            self.disable(str(error))

    def disable(self, reason: str) -> None:
        self.answer = RankAnswer(reason=reason)
        logger.error("KV blocks of this engine are neither saved nor loaded: %s", reason)

    def _start(self, memory: KVMemory, facts: EngineFacts) -> None:
        layout = memory.layout
        namespace = build_namespace(facts, layout, self.config)
        digest = namespace.digest()
        staging = Staging(layout.layer_size_bytes, self.config.staging_size_bytes, memory.make_rows)
        store = self._make_store()

        def keys_of(block_hashes: Sequence[bytes], variant: bytes) -> list[bytes]:
            return block_keys(variant_namespace(digest, variant), block_hashes)

        self._store, self._memory = store, memory
        for buffer in memory.arrivals():
            store.register(buffer)
        if facts.writes:
            store.register(staging.rows.all_rows())
            self._saver = Saver(store, memory, staging, keys_of, self.counters, self._trace, self.guard)
        self._loader = Loader(
            store,
            memory,
            keys_of,
            self.counters,
            self._trace,
            self.guard,
            num_threads=self.config.load_threads,
            batch_blocks=self.config.load_batch_blocks,
        )
        self.answer = RankAnswer(namespace=digest)
        logger.info(
            "KV blocks shared through %s as %s: %d layers, %d bytes per block, %s",
            self.config.store_address,
            digest.hex(),
            layout.num_layers,
            layout.block_size_bytes,
            namespace,
        )

    # ---- one step

    def asked_answer(self) -> RankAnswer | None:
        """This rank's answer, if the current step's plan asks for it."""
        return self.answer if self._plan.asks_ranks else None

    def begin_step(self, plan: StepPlan) -> None:
        self._plan = plan
        if plan.distrusts_loads and self._loader is not None:
            self._loader.distrust()
        if self._saver is not None:
            self._saver.begin_step(plan.saves)
            if self._loader is not None and self._loader.is_failure_untold:
                self._distrust_step()

    def start_loads(self) -> None:
        if self._loader is not None:
            self._loader.start(self._plan.loads)

    def wait_layer(self, layer_name: str) -> None:
        """Returns when the layer's KV is in the engine's blocks, or its load has failed."""
        if self._loader is not None and self._memory is not None:
            layer = self._memory.layout.layer_index.get(layer_name)
            if layer is not None and not self._loader.wait_layer(layer):
                self._distrust_step()

    def save_layer(self, layer_name: str) -> None:
        if self._saver is not None and self._memory is not None and self._layer_hooks:
            layer = self._memory.layout.layer_index.get(layer_name)
            if layer is not None:
                self._saver.save_layer(layer)

    def end_step(self) -> None:
        try:
            if self._loader is not None and not self._loader.end_step():
                self._distrust_step()
            if self._saver is not None:
                self._saver.end_step()
        finally:
            if self._memory is not None:
                self._memory.end_saves()

    def _distrust_step(self) -> None:
        """Some request computed on top of KV that did not come, and others may share its blocks: vLLM throws
        their tokens away and recomputes, and nothing this step computed may reach other engines."""
        if self._saver is not None:
            self._saver.abandon_step()

    def take_finished(self, finished_request_ids: set[str]) -> set[str]:
        """Requests whose asynchronous load has ended. `finished_request_ids`: requests that have left."""
        if self._loader is None:
            return set()
        self._loader.cancel(finished_request_ids)
        if not self._plan.runs_model:
            self._loader.wait_any(IDLE_STEP_WAIT_MS)
        finished, failed = self._loader.take_finished()
        # Handed over by take_failed_blocks in the same step: vLLM wants them no later than the request.
        self._failed_blocks |= failed
        return finished

    def take_failed_blocks(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    # ---- ending

    def drain(self, timeout_ms: float) -> bool:
        """Waits until all saves have arrived in the store; False when time ran out."""
        return self._saver is None or self._saver.drain(timeout_ms)

    def shutdown(self) -> None:
        """Gives saves `drain_timeout_ms` to arrive. May be called more than once."""
        if self._saver is not None:
            self._saver.close(self.config.drain_timeout_ms)
        if self._loader is not None:
            self._loader.close()
        if self._store is not None:
            self._store.close()
        self._trace.close()
        self._saver = self._loader = self._store = None
