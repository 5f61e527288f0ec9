"""The one thread of a disk that appends: takes what waits, makes batches of it, rolls and reclaims
segments."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from kvcore.wire.messages import Status
from store_server.ssd.aligned import Arena
from store_server.ssd.batch import batch_bytes, build_batch
from store_server.ssd.config import SsdConfig
from store_server.ssd.disk_io import NO_ROOM_ERRNOS, RECLAIM_ERRNOS, TRANSIENT_ERRNOS, write_all
from store_server.ssd.events import BatchWritten, Event, SegmentsDropped, WritesRefused
from store_server.ssd.format import PAGE_BYTES, round_up
from store_server.ssd.segments import NoRoom, OpenSegment, SegmentFiles
from store_server.ssd.types import WriteRequest

log = logging.getLogger(__name__)

# Keeps the header of a batch of small objects, and the memory for their last pages, within reason.
MAX_WRITES_IN_BATCH = 1024


class Writer:
    """`offer`, `remove` and `stop` are called from the loop; `on_failure` from the thread, which then
    ends."""

    def __init__(
        self,
        disk: int,
        files: SegmentFiles,
        config: SsdConfig,
        next_sequence: Callable[[], int],
        emit: Callable[[Event], None],
        on_failure: Callable[[OSError], None],
    ) -> None:
        self._disk, self._files, self._config = disk, files, config
        self._next_sequence, self._emit, self._on_failure = next_sequence, emit, on_failure
        self._wake = threading.Condition()
        self._queue: deque[WriteRequest | bytes] = deque()  # bytes: a key to remove
        self._busy_bytes = 0
        self._stopping = False
        self._failed = False
        self.has_lost_removals = False
        """Read after `stop`: what was to be removed is still there after the next start."""
        self._full_until = 0.0
        self._open: OpenSegment | None = None
        self._arena = Arena(config.batch_bytes + MAX_WRITES_IN_BATCH * PAGE_BYTES)
        self._settler = ThreadPoolExecutor(1, thread_name_prefix=f"ssd-{disk}-settler")
        self._thread = threading.Thread(target=self._run, name=f"ssd-{disk}-writer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def queued_bytes(self) -> int:
        """Bytes accepted and not yet on disk."""
        return self._busy_bytes

    @property
    def takes_writes(self) -> bool:
        return not (self._failed or self._stopping) and time.monotonic() >= self._full_until

    def offer(self, write: WriteRequest, over_limit: bool = False) -> bool:
        """Queue it, or say False when the queue is full. An object larger than the whole queue goes alone."""
        size_bytes = round_up(write.size_bytes)
        with self._wake:
            room = self._busy_bytes == 0 or self._busy_bytes + size_bytes <= self._config.queue_bytes
            if not self.takes_writes or not (room or over_limit):
                return False
            self._busy_bytes += size_bytes
            self._queue.append(write)
            self._wake.notify()
        return True

    def remove(self, keys: Sequence[bytes]) -> None:
        with self._wake:
            if not self._failed:
                self._queue.extend(keys)
                self._wake.notify()

    def fail(self) -> None:
        """Take no more; the thread refuses what waits and ends."""
        with self._wake:
            self._failed = True
            self._wake.notify()

    def stop(self) -> None:
        """Write what waits, seal the segment, end. Blocks until done."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            writes, removed = self._take()
            if self._failed or not (writes or removed):
                break
            try:
                self._append(writes, removed)
            except NoRoom as error:
                self._refuse_for_now(writes, removed, error)
            except OSError as error:
                if error.errno in TRANSIENT_ERRNOS:
                    self._refuse_for_now(writes, removed, error)
                else:
                    self._failed = True
                    self.has_lost_removals |= bool(removed)
                    self._on_failure(error)
                    self._refuse(writes, Status.UNAVAILABLE)
            finally:
                self._release(writes)
        self._finish()

    def _take(self) -> tuple[list[WriteRequest], list[bytes]]:
        """The next batch's worth; empty when it is time to end."""
        writes: list[WriteRequest] = []
        removed: dict[bytes, None] = {}
        with self._wake:
            self._wait_for_work()
            if self._failed:
                return [], []
            taken_bytes, written = 0, set()
            while self._queue and len(writes) + len(removed) < MAX_WRITES_IN_BATCH:
                item = self._queue[0]
                if isinstance(item, bytes):
                    if item in written:
                        break  # within a batch removals come first: this one has to follow in the next
                    removed[item] = None
                else:
                    if writes and taken_bytes + item.size_bytes > self._config.batch_bytes:
                        break
                    writes.append(item)
                    written.add(item.key)
                    taken_bytes += item.size_bytes
                self._queue.popleft()
        return writes, list(removed)

    def _wait_for_work(self) -> None:
        while not (self._queue or self._stopping or self._failed):
            self._wake.wait()
        deadline = time.monotonic() + self._config.linger_ms / 1e3
        while self._busy_bytes < self._config.batch_bytes and not (self._stopping or self._failed):
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0 or not self._wake.wait(remaining_s):
                break

    def _append(self, writes: Sequence[WriteRequest], removed: Sequence[bytes]) -> None:
        length_bytes = batch_bytes(writes, removed)
        if self._open is None or self._open.free_bytes < length_bytes:
            self._roll(length_bytes)
        segment = self._open
        assert segment is not None
        offset_bytes, sequence = segment.contents.used_bytes, self._next_sequence()
        self._arena.reset()
        batch = build_batch(writes, removed, segment.segment_id, offset_bytes, sequence, self._arena)
        self._write(segment, batch.views, offset_bytes)
        segment.contents.apply(batch.body, offset_bytes, sequence)
        segment.contents.used_bytes = offset_bytes + batch.length_bytes
        segment.contents.last_sequence = sequence
        records = [segment.contents.records[write.key] for write in writes]
        self._emit(BatchWritten(self._disk, segment.segment_id, records, writes, removed))

    def _write(self, segment: OpenSegment, views: Sequence[memoryview], offset_bytes: int) -> None:
        while True:
            try:
                return write_all(self._files.io, segment.fd, views, segment.base_bytes + offset_bytes)
            except OSError as error:
                if error.errno not in NO_ROOM_ERRNOS:
                    raise
                # Only where the file system cannot preallocate does room run out in the middle of a segment.
                oldest = next(iter(self._files.sizes_bytes))
                if error.errno not in RECLAIM_ERRNOS or oldest == segment.segment_id:
                    raise NoRoom(f"{self._files.folder.path}: {error.strerror}") from error
                self._files.reclaim_oldest()
                self._emit(SegmentsDropped(self._disk, [oldest]))

    def _roll(self, min_bytes: int) -> None:
        if self._open is not None:
            closed, self._open = self._open, None
            self._files.close(closed)
            self._settler.submit(self._files.settle, closed)
        dropped: list[int] = []
        try:
            self._open = self._files.create(min_bytes, dropped)
        finally:
            if dropped:
                self._emit(SegmentsDropped(self._disk, dropped))

    def _refuse_for_now(
        self, writes: Sequence[WriteRequest], removed: Sequence[bytes], error: Exception
    ) -> None:
        log.warning("%s; writing there again in %g s", error, self._config.retry_s)
        self._full_until = time.monotonic() + self._config.retry_s
        self._refuse(writes, Status.FULL)
        with self._wake:
            waiting = [item for item in self._queue if isinstance(item, WriteRequest)]
            # Removals must not be lost; they go out with the next batch that finds room.
            keys = [*removed, *(item for item in self._queue if isinstance(item, bytes))]
            self._queue.clear()
        self._refuse(waiting, Status.FULL)
        self._release(waiting)
        with self._wake:
            if self._stopping:
                self.has_lost_removals |= bool(keys)
            else:
                self._queue.extendleft(reversed(keys))
                self._wake.wait_for(lambda: self._stopping or self._failed, timeout=self._config.retry_s)

    def _refuse(self, writes: Sequence[WriteRequest], status: Status) -> None:
        if writes:
            self._emit(WritesRefused(self._disk, writes, status))

    def _release(self, writes: Sequence[WriteRequest]) -> None:
        with self._wake:
            self._busy_bytes -= sum(round_up(write.size_bytes) for write in writes)

    def _finish(self) -> None:
        with self._wake:
            self._failed = self._failed or not self._stopping
            waiting = [item for item in self._queue if isinstance(item, WriteRequest)]
            self.has_lost_removals |= len(waiting) < len(self._queue)
            self._queue.clear()
        self._refuse(waiting, Status.UNAVAILABLE)
        self._release(waiting)
        if self._open is not None:
            segment, self._open = self._open, None
            try:
                self._files.close(segment)
            except OSError as error:
                log.warning("%s: not truncated: %s", self._files.folder.path, error)
            self._settler.submit(self._files.settle, segment)
        self._settler.shutdown(wait=True)
