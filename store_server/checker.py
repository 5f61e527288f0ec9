"""Checks the bytes of everything a running store holds against the checksums their writers gave."""

import asyncio
import logging
import struct
from collections.abc import Sequence

from kvcore import metrics
from kvcore.transport.checksums import is_corrupt
from kvcore.wire.messages import CheckedLevel, Tier, VerifyReply
from store_server.cold_levels import ColdLevels
from store_server.core.objects import StoredObject
from store_server.core.spans import layer_spans
from store_server.core.store import Store
from store_server.payload import PayloadViews
from store_server.remote.check import RemoteCheck

logger = logging.getLogger(__name__)

_BATCH_BYTES = 64 << 20


class _Stopped(Exception):
    pass


class Checker:
    """One check at a time, of DRAM, SSD and remote at once. Bytes are read in worker threads, so that
    everybody else is served meanwhile. Corrupt objects are dropped: a miss is better than wrong bytes."""

    def __init__(self, store: Store, cold: ColdLevels | None, views: PayloadViews) -> None:
        self._store = store
        self._ssd = cold.ssd if cold is not None else None
        self._remote = cold.remote if cold is not None else None
        self._views = views
        self._task: asyncio.Task[None] | None = None
        self._remote_task: asyncio.Task[None] | None = None
        self._is_stopping = False
        self._num_objects = self._num_checked = self._num_corrupt = self._num_unchecked = 0
        self._num_ssd_objects = self._num_ssd_checked = self._num_ssd_corrupt = 0
        self._of_remote: RemoteCheck | None = None
        self._trouble = ""

    def start(self, remote_bytes_per_s: int) -> None:
        """Begins a check unless one is running. 0: not of the remote."""
        if self._task is None:
            self._num_checked = self._num_corrupt = self._num_unchecked = 0
            self._num_ssd_checked = self._num_ssd_corrupt = 0
            keys = [obj.key for obj in self._store.catalog.by_key.values() if obj.is_sealed]
            self._num_objects = len(keys)
            self._num_ssd_objects = len(self._ssd) if self._ssd is not None else 0
            self._of_remote, self._trouble = None, ""
            if self._remote is not None and remote_bytes_per_s:
                self._of_remote, self._trouble = self._remote.check(), self._remote.trouble
            self._task = asyncio.get_running_loop().create_task(self._check(keys, remote_bytes_per_s))

    def report(self) -> VerifyReply:
        levels = [CheckedLevel(Tier.DRAM, self._num_objects, self._num_checked, self._num_corrupt)]
        if self._ssd is not None:
            levels.append(
                CheckedLevel(Tier.SSD, self._num_ssd_objects, self._num_ssd_checked, self._num_ssd_corrupt)
            )
        remote, trouble = self._of_remote, self._trouble
        if remote is not None:
            levels.append(remote.level)
            trouble = trouble or remote.trouble
        return VerifyReply(0, self._task is not None, levels, self._num_unchecked, trouble)

    async def cancel(self) -> None:
        """Returns when no thread reads the pool or the SSD any more, and nothing is asked of the remote."""
        self._is_stopping = True
        if self._remote_task is not None:
            self._remote_task.cancel()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def _check(self, keys: Sequence[bytes], remote_bytes_per_s: int) -> None:
        remote_task: asyncio.Task[None] | None = None
        if self._of_remote is not None:
            remote_task = asyncio.get_running_loop().create_task(self._of_remote.run(remote_bytes_per_s))
        self._remote_task = remote_task
        try:
            await self._check_dram(keys)
            if self._ssd is not None and not self._is_stopping:
                self._num_ssd_objects, corrupt = await asyncio.to_thread(
                    self._ssd.verify, self._on_ssd_progress
                )
                self._num_ssd_checked = self._num_ssd_objects
                self._num_ssd_corrupt = len(corrupt)
            if remote_task is not None:
                await asyncio.wait({remote_task})
        except _Stopped:
            pass
        finally:
            if remote_task is not None:
                remote_task.cancel()
                await asyncio.gather(remote_task, return_exceptions=True)
            self._task = self._remote_task = None
            report = self.report()
            logger.info(
                "objects checked",
                extra={
                    "objects": report.num_done,
                    "corrupt": report.num_corrupt,
                    "unread": sum(level.num_unread for level in report.levels),
                    "trouble": report.trouble,
                },
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
        self._num_ssd_checked = done
        if self._is_stopping:
            raise _Stopped
