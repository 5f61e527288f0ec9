"""Runs the loads of requests in threads and tells the engine's thread how they ended.

A load never outlives its deadline by more than a transfer's grace, always ends in a report, and leaves no
block half-written: blocks that did not come are zero-filled before anybody is told, and on a device what did
come has been copied there.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from kvcore import metrics
from kvcore.client.base import LayerwiseStore
from kvcore.guard import Guard
from mooncake_connector.counters import Counters
from mooncake_connector.kv_memory import REACHED, Done, KVMemory
from mooncake_connector.load_job import (
    TRANSFER_GRACE_MS,
    LoadContext,
    follow_writer,
    load_layer_by_layer,
    load_whole_blocks,
)
from mooncake_connector.metadata import LoadMode, LoadSpec
from mooncake_connector.tracing import LayerTrace


class _Load:
    def __init__(self, spec: LoadSpec, context: LoadContext) -> None:
        self.spec = spec
        self.context = context
        self.layers_done = 0
        self.is_distrusted = False
        self.is_stuck = False
        self.lost_blocks: set[int] = set()
        self.layer_in: list[Done] = []  # reached when layer l is in the engine's tensors; may end early


class Loader:
    def __init__(
        self,
        store: LayerwiseStore,
        memory: KVMemory,
        keys_of: Callable[[Sequence[bytes], bytes], list[bytes]],
        counters: Counters,
        trace: LayerTrace,
        guard: Guard,
        *,
        num_threads: int,
        batch_blocks: int,
    ) -> None:
        self._store = store
        self._memory = memory
        self._layout = memory.layout
        self._keys_of = keys_of
        self._counters = counters
        self._trace = trace
        self._guard = guard
        self._batch_blocks = batch_blocks
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="mooncake-load")
        # Followers may wait long for their prefill engines and must not hold up the others.
        self._followers = ThreadPoolExecutor(num_threads, thread_name_prefix="mooncake-follow")
        self._changed = threading.Condition()
        self._running: dict[str, _Load] = {}
        self._sync: list[_Load] = []
        self._refused_sync = False
        self.is_failure_untold = False
        """vLLM has not heard yet that blocks of a synchronous load were given up, and goes on with them."""
        self._finished_requests: set[str] = set()
        self._failed_blocks: set[int] = set()

    # ---- engine thread

    def start(self, specs: Iterable[LoadSpec]) -> None:
        for spec in specs:
            try:
                self._memory.begin_loads()
                self._submit(spec)
            except Exception as error:  # a request that is never reported would wait for ever
                self._guard.report("load", error)
                self._refused_sync |= spec.mode is LoadMode.SYNC
                self._report(spec, spec.block_ids)

    def _submit(self, spec: LoadSpec) -> None:
        load = _Load(spec, self._context(spec))
        with self._changed:
            self._running[spec.request_id] = load
            if spec.mode is LoadMode.SYNC:
                self._sync.append(load)
        pool = self._followers if spec.mode is LoadMode.FOLLOW else self._pool
        pool.submit(self._run, load)

    def wait_layer(self, layer: int) -> bool:
        """Returns when `layer` of all synchronous loads of this step has arrived or was given up.

        False when blocks were given up: what this step computes with them is worthless.
        """
        intact = not self._refused_sync
        if not self._sync:
            return intact
        with self._changed:
            for load in self._sync:
                limit = max(0.0, load.context.deadline - time.monotonic()) + 2 * TRANSFER_GRACE_MS / 1e3
                # One that has outlived its deadline once is not waited for at every further layer.
                limit = 0.0 if load.is_stuck else limit
                arrived = self._changed.wait_for(lambda load=load: load.layers_done > layer, limit)  # type: ignore[misc]
                if not arrived:
                    load.is_stuck = load.context.cancelled = True
                    self._failed_blocks.update(load.spec.block_ids)
                intact = intact and arrived and not load.lost_blocks
                if load.layer_in:
                    self._memory.engine_after(load.layer_in[min(layer, len(load.layer_in) - 1)])
        return intact

    def end_step(self) -> bool:
        """Ends the synchronous part of a step; False as in wait_layer."""
        intact = self.wait_layer(self._layout.num_layers - 1)
        self.is_failure_untold = not intact
        self._sync, self._refused_sync = [], False
        return intact

    def take_finished(self) -> tuple[set[str], set[int]]:
        """(requests whose asynchronous load ended, vLLM blocks that did not come) since the last call."""
        self.is_failure_untold = False
        with self._changed:
            finished, self._finished_requests = self._finished_requests, set()
            failed, self._failed_blocks = self._failed_blocks, set()
        return finished, failed

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Their loads end soon; they are reported like any other, so that vLLM frees the blocks."""
        with self._changed:
            for request_id in request_ids:
                if (load := self._running.get(request_id)) is not None:
                    load.context.cancelled = True

    def distrust(self) -> None:
        """Of the loads that have not ended, nothing that they brought counts."""
        with self._changed:
            for load in self._running.values():
                load.is_distrusted = load.context.cancelled = True

    def wait_any(self, timeout_ms: float) -> None:
        """Sleeps until some load ends: for steps in which the engine has nothing else to do."""
        with self._changed:
            if self._running and not self._finished_requests:
                self._changed.wait(timeout_ms / 1e3)

    def close(self) -> None:
        with self._changed:
            for load in self._running.values():
                load.context.cancelled = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._followers.shutdown(wait=False, cancel_futures=True)

    # ---- load threads

    def _context(self, spec: LoadSpec) -> LoadContext:
        keys = self._keys_of(spec.block_hashes, spec.variant)

        def on_layers(layers: range, first: int) -> None:
            self._trace.record("load_layer_done", spec.request_id, layers, keys[first])

        deadline = time.monotonic() + spec.timeout_ms / 1e3
        return LoadContext(
            self._store, self._memory, keys, spec.block_ids, deadline, self._batch_blocks, on_layers
        )

    def _run(self, load: _Load) -> None:
        complete = 0
        started = time.monotonic()
        try:
            loaded = self._load(load)
            self._memory.delivered().wait()
            with self._changed:
                complete = 0 if load.is_distrusted else loaded
        except Exception as error:
            self._guard.report("load", error)
        finally:
            self._counters.add(metrics.LOAD_SECONDS_TOTAL, time.monotonic() - started)
            self._finish(load, complete)

    def _load(self, load: _Load) -> int:
        context = load.context
        if load.spec.mode is LoadMode.SYNC:
            return load_layer_by_layer(
                context, lambda layer, complete: self._layer_done(load, layer, complete)
            )
        num_blocks = len(context.keys)
        if load.spec.mode is LoadMode.ASYNC:
            return load_whole_blocks(context, 0, num_blocks)
        # A prompt seen before is sealed already, and whole blocks move with fewer messages than layers.
        sealed = self._store.lookup(context.keys).num_hits
        complete = load_whole_blocks(context, 0, sealed)
        return complete if complete < sealed else follow_writer(context, sealed, num_blocks)

    def _layer_done(self, load: _Load, layer: int, complete: int) -> None:
        self._give_up(load, complete)
        with self._changed:
            load.layer_in.append(self._memory.delivered())
            load.layers_done = layer + 1
            self._changed.notify_all()

    def _give_up(self, load: _Load, complete: int) -> None:
        """Blocks from `complete` on are lost. They are zeroed before the engine may look at them."""
        lost = [block_id for block_id in load.spec.block_ids[complete:] if block_id not in load.lost_blocks]
        if not lost:
            return
        load.lost_blocks.update(lost)
        self._memory.zero(lost)
        if load.spec.mode is LoadMode.SYNC:
            # The step that runs right now must report them; it ends once the last layer counts as done.
            with self._changed:
                self._failed_blocks.update(lost)

    def _finish(self, load: _Load, complete: int) -> None:
        self._guard.call(None, self._give_up, load, complete)
        zeroed = self._guard.call(REACHED, self._memory.delivered)
        if load.spec.mode is not LoadMode.SYNC:
            # The engine does not look for `layer_in` then: what it is told of must be there.
            self._guard.call(None, zeroed.wait)
        self._counters.add(metrics.LOADED_BLOCKS_TOTAL, complete)
        self._counters.add(metrics.LOADED_BYTES_TOTAL, complete * self._layout.block_size_bytes)
        lost = load.spec.block_ids[complete:]
        if lost:
            self._counters.add(metrics.LOADS_FAILED_TOTAL)
            self._counters.add(metrics.LOAD_FAILED_BLOCKS_TOTAL, len(lost))
        with self._changed:
            load.layer_in.append(zeroed)
            load.layers_done = self._layout.num_layers
        self._report(load.spec, lost if load.spec.mode is not LoadMode.SYNC else [])

    def _report(self, spec: LoadSpec, lost: list[int]) -> None:
        with self._changed:
            self._running.pop(spec.request_id, None)
            self._failed_blocks.update(lost)
            if spec.mode is not LoadMode.SYNC:
                self._finished_requests.add(spec.request_id)
            self._changed.notify_all()
