"""Checks the bytes of everything a running store holds against the checksums their writers gave."""

import asyncio
import logging
import struct
from collections.abc import Sequence

from kvcore import metrics
from kvcore.transport.checksums import is_corrupt
from kvcore.wire.messages import VerifyReply
from store_server.cold import SsdColdTier
from store_server.core.objects import StoredObject
from store_server.core.spans import layer_spans
from store_server.core.store import Store
from store_server.payload import PayloadViews

logger = logging.getLogger(__name__)

_BATCH_BYTES = 64 << 20


class _Stopped(Exception):
    pass


class Checker:
    """One check at a time, in a worker thread, so that everybody else is served meanwhile. Corrupt objects
    are dropped: a miss is better than wrong bytes."""

    def __init__(self, store: Store, cold: SsdColdTier | None, views: PayloadViews) -> None:
        self._store = store
        self._cold = cold
        self._views = views
        self._task: asyncio.Task[None] | None = None
        self._is_stopping = False
        self._num_objects = self._num_checked = self._num_corrupt = self._num_unchecked = 0
        self._num_on_ssd = 0

    def start(self) -> None:
        """Begins a check unless one is running."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._check())

    def report(self) -> VerifyReply:
        return VerifyReply(
            0,
            self._task is not None,
            self._num_objects,
            self._num_checked + self._num_on_ssd,
            self._num_corrupt,
            self._num_unchecked,
        )

    async def cancel(self) -> None:
        """Returns when no thread reads the pool or the SSD any more."""
        self._is_stopping = True
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def _check(self) -> None:
        self._num_checked = self._num_corrupt = self._num_unchecked = self._num_on_ssd = 0
        try:
            keys = [obj.key for obj in self._store.catalog.by_key.values() if obj.is_sealed]
            self._num_objects = len(keys) + (len(self._cold) if self._cold is not None else 0)
            await self._check_dram(keys)
            if self._cold is not None and not self._is_stopping:
                num_on_ssd, corrupt = await asyncio.to_thread(self._cold.verify, self._on_ssd_progress)
                self._num_on_ssd = num_on_ssd
                self._num_corrupt += len(corrupt)
        except _Stopped:
            return
        finally:
            self._task = None
            logger.info(
                "objects checked",
                extra={"objects": self._num_checked + self._num_on_ssd, "corrupt": self._num_corrupt},
            )

    async def _check_dram(self, keys: Sequence[bytes]) -> None:
        batch: list[StoredObject] = []
        batch_bytes = 0
        for key in keys:
            obj = self._store.catalog.by_key.get(key)
            if obj is None or not obj.is_sealed:
                self._num_checked += 1
                continue
            batch.append(obj)
            batch_bytes += obj.size_bytes
            if batch_bytes >= _BATCH_BYTES:
                await self._check_batch(batch)
                batch, batch_bytes = [], 0
                if self._is_stopping:
                    return
        await self._check_batch(batch)

    async def _check_batch(self, batch: list[StoredObject]) -> None:
        for obj in batch:
            obj.users += 1
        try:
            corrupt = await asyncio.to_thread(lambda: [obj for obj in batch if self._is_corrupt(obj)])
        finally:
            self._store.space.release(batch)
        self._num_checked += len(batch)
        self._num_unchecked += sum(not any(obj.checksums) for obj in batch)
        self._num_corrupt += len(corrupt)
        for obj in corrupt:
            logger.error("an object in DRAM is corrupt and dropped", extra={"key": obj.key.hex()})
            self._store.counters[metrics.CORRUPT_TOTAL] += 1
            if not obj.gone:
                self._store.space.discard(obj)

    def _is_corrupt(self, obj: StoredObject) -> bool:
        checksums = struct.unpack(f"<{len(obj.checksums) // 8}Q", obj.checksums)
        return bool(checksums) and is_corrupt(self._views.of(layer_spans(obj, 0, obj.num_layers)), checksums)

    def _on_ssd_progress(self, done: int, total: int) -> None:
        """In the worker thread."""
        self._num_on_ssd = done
        if self._is_stopping:
            raise _Stopped
