"""Layer-wise save: layer l goes to the store while the engine computes layer l + 1.

In a step the engine's thread calls begin_step, save_layer for each layer, end_step; each copies (or has the
device copy) and queues, none waits. One save thread reserves, waits for the copies, writes and commits, so
the layers of a block are committed in order.
Losing a save is never an error: it is a later miss, counted here.
"""

import queue
import threading
from collections.abc import Callable, Sequence

from kvcore import metrics
from kvcore.client.base import LayerwiseStore
from kvcore.guard import Guard
from kvcore.wire.messages import Status
from mooncake_connector.counters import Counters
from mooncake_connector.kv_memory import KVMemory
from mooncake_connector.metadata import SaveSpec
from mooncake_connector.staging import Staging
from mooncake_connector.step_save import LayerRun, StepSave
from mooncake_connector.tracing import LayerTrace

# Steps the save thread may lag behind; more means the store does not answer, and new blocks are skipped.
MAX_STEPS_QUEUED = 256
PRESENT = (Status.EXISTS, Status.PENDING)


class Saver:
    def __init__(
        self,
        store: LayerwiseStore,
        memory: KVMemory,
        staging: Staging,
        keys_of: Callable[[Sequence[bytes], bytes], list[bytes]],
        counters: Counters,
        trace: LayerTrace,
        guard: Guard,
    ) -> None:
        self._store = store
        self._memory = memory
        self._layout = memory.layout
        self._staging = staging
        self._keys_of = keys_of
        self._counters = counters
        self._trace = trace
        self._guard = guard
        self._step: StepSave | None = None
        self._queue: queue.SimpleQueue[StepSave | None] = queue.SimpleQueue()
        self._open = 0
        self._idle = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="mooncake-save", daemon=True)
        self._thread.start()

    # ---- engine thread

    def begin_step(self, specs: Sequence[SaveSpec]) -> None:
        """Starts reserving room for blocks that this step fills."""
        self._step = None
        if not specs:
            return
        keys = [self._keys_of(spec.block_hashes, spec.variant) for spec in specs]
        parents = [
            self._keys_of([spec.parent_hash], spec.variant)[0] if spec.parent_hash else b"" for spec in specs
        ]
        step = StepSave(specs, keys, parents)
        if self._open >= MAX_STEPS_QUEUED:
            self._counters.add(metrics.SAVE_SKIPPED_STAGING_TOTAL, len(step.keys))
            if not step.followed_indices:
                return
            # Whoever follows is told by the save thread: the store may not even take a word now.
            step.abandon()
        else:
            self._step = step
        with self._idle:
            self._open += 1
        self._queue.put(step)

    def save_layer(self, layer: int) -> None:
        if (step := self._step) is not None:
            try:
                lost = step.snapshot(layer, self._memory, self._staging)
            except Exception:
                self.abandon_step()
                raise
            self._counters.add(metrics.SAVE_SKIPPED_STAGING_TOTAL, lost)
            self._queue.put(step)

    def end_step(self) -> None:
        """Copies the layers that no hook announced: those inside full CUDA graphs, for one."""
        if (step := self._step) is not None:
            for layer in step.missing_layers(self._layout.num_layers):
                self.save_layer(layer)
            self._step = None

    def abandon_step(self) -> None:
        """The KV computed in this step is not to be trusted: none of its blocks may become visible."""
        if (step := self._step) is not None:
            step.abandon()
            self._queue.put(step)
            self._step = None

    def drain(self, timeout_ms: float) -> bool:
        """Waits until everything saved so far is in the store; False when time ran out."""
        with self._idle:
            return self._idle.wait_for(lambda: self._open == 0, timeout_ms / 1e3)

    def close(self, timeout_ms: float) -> None:
        self.abandon_step()
        self.drain(timeout_ms)
        self._queue.put(None)
        self._thread.join(timeout_ms / 1e3)

    # ---- save thread

    def _run(self) -> None:
        while (step := self._queue.get()) is not None:
            try:
                self._advance(step)
            except Exception as error:  # the thread must outlive any bug, or staging would fill up for good
                self._guard.report("save", error)
                step.abandon()
                self._finish(step, abort=True)

    def _advance(self, step: StepSave) -> None:
        if step.finished:
            self._staging.give(step.leftover_slots())
            return
        if step.granted is None and not step.abandoned:
            self._reserve(step)
        if step.abandoned:
            self._finish(step, abort=True)
            return
        # A thread that lags behind finds several layers here and sends them as one.
        while (run := step.next_run()) is not None:
            try:
                self._write(step, run)
            finally:
                self._staging.give([slot for layer in run.slots for slot in layer.values()])
        if step.complete_layers == self._layout.num_layers:
            self._finish(step, abort=False)

    def _reserve(self, step: StepSave) -> None:
        statuses = self._store.reserve(
            step.keys, self._layout.block_size_bytes, self._layout.num_layers, parents=step.parents
        )
        step.grant([index for index, status in enumerate(statuses) if status is Status.OK])
        self._counters.add(metrics.SAVE_SKIPPED_PRESENT_TOTAL, sum(status in PRESENT for status in statuses))
        self._counters.add(metrics.SAVE_SKIPPED_FULL_TOTAL, sum(status is Status.FULL for status in statuses))
        refused = [i for i, status in enumerate(statuses) if status not in (Status.OK, *PRESENT)]
        self._counters.add(
            metrics.SAVE_FAILED_BLOCKS_TOTAL, sum(statuses[i] is not Status.FULL for i in refused)
        )
        # A decode engine may be waiting for these already.
        self._abort(step, [index for index in refused if step.followed[index]])

    def _write(self, step: StepSave, run: LayerRun) -> None:
        granted = step.granted or []
        whole = [index for index in granted if all(index in slots for slots in run.slots)]
        if lost := sorted(set(granted).difference(whole)):
            step.drop(lost)
            self._abort(step, lost)
        if not whole:
            return
        run.wait_copied()
        buffers = [[self._staging.rows.row(slots[index]) for slots in run.slots] for index in whole]
        keys = [step.keys[index] for index in whole]
        statuses = self._store.write_layers(keys, run.begin, run.end, buffers).wait()
        failed = [index for index, status in zip(whole, statuses, strict=True) if status is not Status.OK]
        if failed:
            self._counters.add(metrics.SAVE_FAILED_BLOCKS_TOTAL, len(failed))
            step.drop(failed)
            self._abort(step, failed)
        num_saved = len(whole) - len(failed)
        self._counters.add(
            metrics.SAVED_BYTES_TOTAL, num_saved * self._layout.layer_size_bytes * (run.end - run.begin)
        )
        if run.end == self._layout.num_layers:
            self._counters.add(metrics.SAVED_BLOCKS_TOTAL, num_saved)
        for index, request_id in step.first_of_request.items():
            if index in whole and index not in failed:
                layers = range(run.begin, run.end)
                self._trace.record("save_layer_committed", request_id, layers, step.keys[index])

    def _abort(self, step: StepSave, indices: Sequence[int]) -> None:
        if indices:
            self._store.abort([step.keys[index] for index in indices])

    def _finish(self, step: StepSave, *, abort: bool) -> None:
        step.finished = True
        self._staging.give(step.leftover_slots())
        if abort:
            self._abort(step, sorted({*(step.granted or []), *step.followed_indices}))
        with self._idle:
            self._open -= 1
            self._idle.notify_all()
