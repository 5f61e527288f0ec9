"""Where SGLang calls in with `--unified-cache-external-linker-backend dynamic` (0.5.23): the device's pools
and the store, with no host cache in between.

SGLang calls from its scheduler's thread, and none of these calls waits for bytes; two threads of our own move
them. Pages that are loaded belong to their request alone until the load has ended well, and a load that fails
ends its request: SGLang aborts it. A lookup or a save that fails is a miss.
"""

import queue
import threading
from collections.abc import Callable
from typing import Any

from sglang.srt.mem_cache.hicache_storage import PoolTransfer
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter, UnifiedCacheLinker
from sglang.srt.utils import get_device_module

from sglang_hicache_backend import compat
from sglang_hicache_backend.attachment import Attachment
from sglang_hicache_backend.device_groups import device_pool_group
from sglang_hicache_backend.device_mover import LayerLoader, LoadError, PageSaver, runs_of
from sglang_hicache_backend.device_pages import DevicePages, SideStream
from sglang_hicache_backend.keys import KV_POOL
from sglang_hicache_backend.log import get_logger
from sglang_hicache_backend.page_store import PageStore
from sglang_hicache_backend.pools import pool_is_replicated
from sglang_hicache_backend.served_weights import SERVED
from sglang_hicache_backend.weight_updates import warn_if_unwatched

logger = get_logger(__name__)

# SGLang's scheduler waits for a lookup, unlike HiCache's; another value can be set.
LOOKUP_TIMEOUT_MS = 50


class MooncakeSuiteLinker(UnifiedCacheLinker):
    """Full attention, sliding windows and Mamba; docs/sglang.md says how to turn it on.

    All methods are called by the scheduler's thread. A configuration that cannot be used is logged as an
    error and leaves a linker that has nothing.
    """

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Any,
        extra_config: dict[str, Any] | None = None,
        forward_stream: Any = None,
    ) -> None:
        self.forward_stream = forward_stream
        kv_pool = params.token_to_kv_pool_allocator.get_kvcache()
        self._group = device_pool_group(kv_pool, params, set(components))
        self.pools = self._group.entry_map
        rank = compat.linker_rank_facts(params, is_replicated=self._group.rank_replicated)
        self._pages = {
            str(name): DevicePages(
                entry,
                str(name),
                is_replicated=pool_is_replicated(str(name), entry.device_pool, rank.is_replicated),
            )
            for name, entry in self.pools.items()
        }
        warn_if_unwatched()
        self._suite = Attachment(
            {"lookup_timeout_ms": LOOKUP_TIMEOUT_MS, **(extra_config or {})},
            rank,
            compat.served_engine,
            weights_version=lambda: SERVED.now.version,
        )
        self._suite.add_device_pools([pages.facts for pages in self._pages.values()])
        self._suite.describe()
        self.layer_done_counter = LayerWiseLoadCounter(self._group.num_layers)
        if "mamba" in self._pages:
            params.req_to_token_pool.register_layer_transfer_counter(self.layer_done_counter)
        self._queued: dict[str, list[PoolTransfer]] = {}
        self._results: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._device = self._group.entries[0].kv_buffer[0].device
        self._loads: queue.Queue[Any] = queue.Queue()
        self._saves: queue.Queue[Any] = queue.Queue()
        self._threads = [
            threading.Thread(target=run, name=f"mooncake-{name}", daemon=True)
            for name, run in (("load", self._run_loads), ("save", self._run_saves))
        ]
        for thread in self._threads:
            thread.start()

    # ---- looking

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        expanded = self._group.resolve_transfers(transfers)
        page_hashes = next((each.keys for each in expanded if each.name == KV_POOL), None)
        if not page_hashes:
            return []
        windows = [
            (str(each.name), each.hit_policy.value, len(each.keys or ()))
            for each in expanded
            if each.name != KV_POOL
        ]
        return self._suite.restorable(page_hashes, windows).lengths

    # ---- loading

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        expanded = self._group.resolve_transfers(transfers, allow_partial=True, allow_missing_kv=True)
        if expanded:
            self._queued[rid] = expanded
        return bool(expanded)

    def cancel_queued_load(self, rid: str) -> bool:
        return self._queued.pop(rid, None) is not None

    def start_layer_wise_loading(self) -> int:
        if not self._queued:
            return -1
        transfers = [each for queued in self._queued.values() for each in queued]
        self._queued = {}
        index: int = self.layer_done_counter.update_producer()
        # The slots may still be read by what the engine has launched before it gave them to this request.
        slots_free = get_device_module().Event()
        slots_free.record()
        self._loads.put((index, transfers, slots_free))
        return index

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        landed: bool = self.layer_done_counter.finish(counter_index)
        return landed

    def _run_loads(self) -> None:
        def make(store: PageStore, stream: SideStream) -> LayerLoader:
            return LayerLoader(store, self._pages, self._device, stream, self._suite.load_timeout_ms)

        def do(loader: LayerLoader | None, task: tuple[int, list[PoolTransfer], Any]) -> None:
            index, transfers, slots_free = task
            try:
                if loader is None:
                    raise LoadError("there is no store")
                slots_free.synchronize()
                loader.load(
                    runs_of(transfers, self._pages),
                    self._group.num_layers,
                    lambda layer: self.layer_done_counter.complete(index, layer),
                )
            except LoadError as error:
                logger.error("a load failed: %s", error)
                self.layer_done_counter.fail(index, error)
            except Exception as error:
                self.layer_done_counter.fail(index, error)
                raise

        self._work(self._loads, make, do)

    # ---- saving

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        self._suite.follow_weights()
        expanded = self._group.resolve_transfers(transfers, allow_partial=True)
        if expanded:
            self._saves.put((expanded, self.record_offload_ready()))
        return bool(expanded)

    def num_completed_offloads(self) -> int:
        return self._results.qsize()

    def pop_completed_offload(self) -> bool:
        return self._results.get_nowait()

    def _run_saves(self) -> None:
        def make(store: PageStore, stream: SideStream) -> PageSaver:
            return PageSaver(store, self._pages, self._device, stream)

        def do(saver: PageSaver | None, task: tuple[list[PoolTransfer], list[Any]]) -> None:
            transfers, ready_events = task
            is_saved = False
            try:
                for event in ready_events:
                    event.synchronize()
                if saver is not None:
                    is_saved = all(saver.save(run) for run in runs_of(transfers, self._pages))
            finally:
                self._results.put(is_saved)

        self._work(self._saves, make, do)

    # ---- the rest

    def reset(self) -> None:
        self._queued.clear()
        self._loads.join()
        self._saves.join()
        while self._results.qsize():
            self._results.get_nowait()
        self.layer_done_counter.reset()

    def close(self) -> None:
        self.reset()
        for tasks in (self._loads, self._saves):
            tasks.put(None)
        for thread in self._threads:
            thread.join()
        self._suite.close()

    def _work(
        self,
        tasks: "queue.Queue[Any]",
        make: Callable[[PageStore, SideStream], Any],
        do: Callable[[Any, Any], None],
    ) -> None:
        """One thread: `do` with each task, and with what `make` has made, or None when there is no store."""
        worker = self._suite.guard.call(None, self._make_worker, make)
        while (task := tasks.get()) is not None:
            self._suite.guard.call(None, do, worker, task)
            tasks.task_done()

    def _make_worker(self, make: Callable[[PageStore, SideStream], Any]) -> Any:
        store = self._suite.store
        return None if store is None else make(store, SideStream(get_device_module(), self._device))
