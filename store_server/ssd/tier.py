"""All SSD paths together: placement, the index, and the outcomes for the store's loop."""

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kvcore.errors import ConfigError
from kvcore.wire.messages import Status
from store_server.core.tiering import Acceptance
from store_server.ssd.config import SsdConfig
from store_server.ssd.disk import Disk
from store_server.ssd.disk_io import DiskIo
from store_server.ssd.events import (
    BatchWritten,
    DiskFailed,
    Event,
    FoundCorrupt,
    ReadDone,
    SegmentsDropped,
    WritesRefused,
)
from store_server.ssd.generation import Generation
from store_server.ssd.index import Index
from store_server.ssd.rebuild import RebuildReport, rebuild_index
from store_server.ssd.types import (
    Dropped,
    Loaded,
    Location,
    Outcome,
    ReadRequest,
    Removed,
    WriteRequest,
    Written,
)

log = logging.getLogger(__name__)

# More batches than are written between two starts of a store.
_SEQUENCES_OF_GENERATION_BITS = 32


class SsdTier:
    """Every method but `notify`'s callback belongs to one thread, the store's loop; `open` and `close` block.

    `notify` is called from disk threads when outcomes wait, once until the next `poll`; it must be
    thread-safe and must not block (`loop.call_soon_threadsafe(...)`).
    """

    def __init__(self, config: SsdConfig, notify: Callable[[], None], io: DiskIo | None = None) -> None:
        self._config = config
        self._notify = notify
        self._events: deque[Event] = deque()
        self._notified = threading.Event()
        self._sequence = itertools.count(1)
        self._index = Index()
        self._writing: dict[bytes, Disk] = {}
        self._cancelled: set[bytes] = set()
        self._generation = Generation()
        self._removing: dict[int, set[bytes]] = {number: set() for number in range(len(config.disks))}
        self.counters = dict.fromkeys(
            ("written_objects", "written_bytes", "read_objects", "read_bytes", "corrupt", "reclaimed"), 0
        )
        io = io or DiskIo()
        self._disks = [
            Disk(number, disk, config, io, lambda: next(self._sequence), self._emit)
            for number, disk in enumerate(config.disks)
        ]

    # ---- life ------------------------------------------------------------------------------------------

    def open(self, *, for_service: bool = True) -> RebuildReport:
        """Claim the paths, rebuild the index, start the threads. A path that cannot be used is left out with
        an error in the log; ConfigError when none is left, or when one is in use by another store. Not
        `for_service`: whether the paths have missed removals stays as it is."""
        report = rebuild_index(self._disks, self._index, for_service=for_service)
        # Later than all that was ever written, also to a path that is not here today.
        first = max(report.last_sequence + 1, report.generation.number << _SEQUENCES_OF_GENERATION_BITS)
        self._sequence = itertools.count(first)
        self._generation = report.generation
        for disk in self._disks:
            if not disk.failed:
                for segment_id in disk.start():
                    self._index.remove_segment(disk.number, segment_id)
                if for_service and (keys := report.outdated.get(disk.number)):
                    disk.writer.remove(keys)
        if all(disk.failed for disk in self._disks):
            raise ConfigError(f"no SSD path can be used: {', '.join(str(d.directory) for d in self._disks)}")
        return report

    def close(self) -> None:
        """Write back what was accepted, seal the segments so that the next start is fast, end the threads.
        The outcomes of the last writes can still be polled."""
        have_missed = [disk for disk in self._disks if not disk.stop_writing()]
        if have_missed:
            self._generation = self._generation.next().with_removal()
            for disk in self._disks:
                is_told = disk not in have_missed
                disk.note_now(self._generation if is_told else self._generation.without_trust())
        for disk in self._disks:
            disk.close()

    # ---- asking ----------------------------------------------------------------------------------------

    def __contains__(self, key: bytes) -> bool:
        return key in self._index

    def __len__(self) -> int:
        return len(self._index)

    def location(self, key: bytes) -> Location | None:
        """Size, layers and place of an object on SSD."""
        return self._index.location(key)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._index)

    @property
    def directories(self) -> list[Path]:
        """Paths in service that are directories."""
        return [disk.directory for disk in self._disks if not disk.failed and disk.directory.is_dir()]

    @property
    def max_object_bytes(self) -> int:
        """Larger ones are REFUSED: an object lies in one segment, and a disk holds at least two."""
        return max((disk.max_object_bytes for disk in self._disks if not disk.failed), default=0)

    @property
    def metadata_bytes(self) -> int:
        """Memory that the index takes."""
        return self._index.memory_bytes()

    def stats(self) -> dict[str, float]:
        working = [disk for disk in self._disks if not disk.failed]
        return {
            "objects": len(self._index),
            "live_bytes": self._index.live_bytes,
            "used_bytes": sum(disk.used_bytes for disk in working),
            "capacity_bytes": sum(disk.capacity_bytes for disk in working),
            "queued_bytes": sum(disk.queued_bytes for disk in working),
            "disks": len(working),
            "disks_failed": len(self._disks) - len(working),
            "metadata_bytes": self.metadata_bytes,
            **{f"{name}_total": value for name, value in self.counters.items()},
        }

    # ---- work ------------------------------------------------------------------------------------------

    def write(self, request: WriteRequest) -> Acceptance:
        """Queue a write-back. ValueError when buffers and sizes do not agree."""
        if sum(len(view) for view in request.buffers) != request.size_bytes:
            raise ValueError(f"buffers of {sum(map(len, request.buffers))} bytes, not {request.size_bytes}")
        if request.checksums and len(request.checksums) != request.num_layers:
            raise ValueError(f"{len(request.checksums)} checksums for {request.num_layers} layers")
        if request.key in self._writing:
            return Acceptance.BUSY
        return self._place(request, over_limit=False)

    def _place(self, request: WriteRequest, over_limit: bool) -> Acceptance:
        """The disk that has written least for its size takes it, unless its queue is full: space fills
        evenly, and a slow disk does not hold up the others."""
        fits = [d for d in self._disks if d.takes_writes and request.size_bytes <= d.max_object_bytes]
        for disk in sorted(fits, key=lambda disk: disk.written_bytes / disk.capacity_bytes):
            if disk.writer.offer(request, over_limit):
                disk.written_bytes += request.size_bytes
                self._writing[request.key] = disk
                return Acceptance.QUEUED
        return Acceptance.BUSY if fits else Acceptance.REFUSED

    def read(self, request: ReadRequest) -> bool:
        """Queue a read; a Loaded outcome follows. False: not on SSD. ValueError when the buffers have another
        size than the object."""
        location = self._index.location(request.key)
        if location is None:
            return False
        if sum(len(view) for view in request.buffers) != location.size_bytes:
            raise ValueError(f"the object has {location.size_bytes} bytes, the buffers another size")
        self._disks[location.disk].submit_read(request, location, self._index.checksums(request.key))
        return True

    def remove(self, keys: Sequence[bytes]) -> None:
        """Gone at once for this process; for good with the Removed outcome of each key that was here."""
        by_disk: dict[int, list[bytes]] = {}
        for key in keys:
            if key in self._writing:
                # The removal follows the write through the queue of its disk, so a stop right now cannot lose
                # it.
                self._cancelled.add(key)
                by_disk.setdefault(self._writing[key].number, []).append(key)
            location = self._index.remove(key)
            if location is not None:
                by_disk.setdefault(location.disk, []).append(key)
        for number, removed in by_disk.items():
            self._removing[number].update(removed)
            self._disks[number].writer.remove(removed)

    def note_removal(self) -> None:
        """A client has something removed, wherever it is: a disk that is not in service must not bring it
        back one day."""
        if self._generation.last_removal < self._generation.number:
            self._generation = self._generation.with_removal()
            self._note_generation()

    def _note_generation(self) -> None:
        for disk in self._disks:
            if not disk.failed:
                disk.note(self._generation)
            elif self._generation.last_removal == self._generation.number:
                disk.note(self._generation.without_trust())

    def poll(self) -> list[Outcome]:
        """What happened since the last call, applied to the index. Never blocks."""
        self._notified.clear()
        outcomes: list[Outcome] = []
        while self._events:
            outcomes += self._apply(self._events.popleft())
        return outcomes

    def verify(self, on_progress: Callable[[int, int], None] | None = None) -> tuple[int, list[bytes]]:
        """Read every object and check its checksums: (objects checked, keys found corrupt). Blocks, so call
        it from a worker thread; what is corrupt is dropped at the next poll. `on_progress(done, total)`."""
        entries = self._index.snapshot()
        found: list[tuple[bytes, Location]] = []
        for done, (key, location) in enumerate(sorted(entries, key=lambda entry: entry[1]), start=1):
            try:
                checksums = self._index.checksums(key)
            except KeyError:
                continue  # removed since the snapshot
            buffer = memoryview(bytearray(location.size_bytes))
            if (
                self._disks[location.disk].read_object(location, checksums, [buffer]) == Status.CORRUPT
                and self._index.location(key) == location
            ):
                found.append((key, location))
            if on_progress is not None:
                on_progress(done, len(entries))
        if found:
            self._emit(FoundCorrupt(found))
        return len(entries), [key for key, _ in found]

    # ---- outcomes --------------------------------------------------------------------------------------

    def _emit(self, event: Event) -> None:
        self._events.append(event)
        if not self._notified.is_set():
            self._notified.set()
            self._notify()

    def _apply(self, event: Event) -> list[Outcome]:
        if isinstance(event, BatchWritten):
            return self._apply_written(event)
        if isinstance(event, WritesRefused):
            return [outcome for write in event.writes for outcome in self._place_again(write, event.status)]
        if isinstance(event, ReadDone):
            return self._apply_read(event)
        if isinstance(event, FoundCorrupt):
            return self._drop_corrupt(event.found)
        if isinstance(event, SegmentsDropped):
            keys = [key for id_ in event.segment_ids for key in self._index.remove_segment(event.disk, id_)]
            self.counters["reclaimed"] += len(keys)
            return [Dropped(keys, "reclaimed")] if keys else []
        assert isinstance(event, DiskFailed)
        return self._apply_failure(event.disk)

    def _apply_failure(self, disk: int) -> list[Outcome]:
        self._generation = self._generation.next()
        if self._removing[disk]:
            self._generation = self._generation.with_removal()  # which it was told of, and may have lost
        self._removing[disk].clear()
        self._note_generation()
        keys = self._index.remove_disk(disk)
        return [Dropped(keys, "disk failed")] if keys else []

    def _apply_written(self, event: BatchWritten) -> list[Outcome]:
        self._removing[event.disk].difference_update(event.removed)
        if self._disks[event.disk].failed:
            return [
                outcome for write in event.writes for outcome in self._place_again(write, Status.UNAVAILABLE)
            ]
        outcomes: list[Outcome] = [Removed(event.removed)] if event.removed else []
        for write, record in zip(event.writes, event.records, strict=True):
            del self._writing[write.key]
            if write.key in self._cancelled:
                self._cancelled.remove(write.key)
                outcomes.append(Written(write, Status.ABANDONED))
                continue
            location = Location(
                event.disk, event.segment_id, record.offset_bytes, record.size_bytes, record.num_layers
            )
            self._index.add(write.key, location, record.checksums)
            self.counters["written_objects"] += 1
            self.counters["written_bytes"] += record.size_bytes
            outcomes.append(Written(write, Status.OK))
        return outcomes

    def _place_again(self, write: WriteRequest, status: Status) -> list[Outcome]:
        """It was accepted, so another disk takes it even over the limit of its queue."""
        del self._writing[write.key]
        if write.key in self._cancelled:
            self._cancelled.remove(write.key)
            return [Written(write, Status.ABANDONED)]
        if self._place(write, over_limit=True) is Acceptance.QUEUED:
            return []
        return [Written(write, status)]

    def _apply_read(self, event: ReadDone) -> list[Outcome]:
        outcomes: list[Outcome] = [Loaded(event.request, event.status, event.checksums)]
        if event.status == Status.OK:
            self.counters["read_objects"] += 1
            self.counters["read_bytes"] += event.location.size_bytes
        elif event.status == Status.CORRUPT:
            outcomes += self._drop_corrupt([(event.request.key, event.location)])
        return outcomes

    def _drop_corrupt(self, found: Sequence[tuple[bytes, Location]]) -> list[Outcome]:
        dropped = [(key, location) for key, location in found if self._index.remove_at(key, location)]
        self.counters["corrupt"] += len(dropped)
        for key, location in dropped:
            self._disks[location.disk].writer.remove([key])
        return [Dropped([key for key, _ in dropped], "corrupt")] if dropped else []
