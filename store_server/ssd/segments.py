"""The segment files of one path and their byte cap. Used by that disk's writer thread, but for `settle`."""

import contextlib
import logging
import os
import threading
from collections import OrderedDict

import xxhash

from store_server.ssd.disk_io import NO_ROOM_ERRNOS, RECLAIM_ERRNOS, DiskIo
from store_server.ssd.folder import Folder, Place
from store_server.ssd.format import (
    SNAPSHOT_MAGIC,
    BatchBody,
    Prelude,
    Record,
    encode_body,
    encode_prelude,
)

log = logging.getLogger(__name__)


class NoRoom(Exception):
    """Neither the disk nor the byte cap has room for another segment, and nothing of ours is left to
    reclaim."""


class Contents:
    """What a segment says about keys: `removed` happened before `records` are looked at."""

    def __init__(self) -> None:
        self.records: dict[bytes, Record] = {}
        self.removed: set[bytes] = set()
        self.used_bytes = 0
        self.last_sequence = 0

    def apply(self, body: BatchBody, base_bytes: int, sequence: int) -> None:
        """The next batch, which begins at `base_bytes` of the segment."""
        for key in body.removed:
            self.removed.add(key)
            self.records.pop(key, None)
        for record in body.records:
            self.records[record.key] = Record(
                record.key,
                base_bytes + record.offset_bytes,
                record.size_bytes,
                record.num_layers,
                record.checksums,
                sequence,
            )

    @classmethod
    def of_snapshot(cls, body: BatchBody, used_bytes: int, last_sequence: int) -> "Contents":
        contents = cls()
        contents.removed = set(body.removed)
        contents.records = {record.key: record for record in body.records}
        contents.used_bytes, contents.last_sequence = used_bytes, last_sequence
        return contents


class OpenSegment:
    """The one segment being appended to."""

    def __init__(self, segment_id: int, place: Place, size_bytes: int) -> None:
        self.segment_id = segment_id
        self.fd, self.base_bytes = place
        self.size_bytes = size_bytes
        self.contents = Contents()

    @property
    def free_bytes(self) -> int:
        return self.size_bytes - self.contents.used_bytes


class SegmentFiles:
    """`sizes_bytes` maps the ids of all our files there, oldest first, to what they take on disk."""

    def __init__(self, folder: Folder, capacity_bytes: int, segment_bytes: int, io: DiskIo) -> None:
        self.folder = folder
        self.capacity_bytes = capacity_bytes
        self.segment_bytes = segment_bytes
        self.io = io
        self.sizes_bytes: OrderedDict[int, int] = OrderedDict()
        self.used_bytes = 0
        self._next_id = 1
        self._lock = threading.Lock()

    def adopt(self, segment_id: int, size_bytes: int) -> None:
        """Count a file found at start."""
        with self._lock:
            self.sizes_bytes[segment_id] = size_bytes
            self.used_bytes += size_bytes
        self._next_id = max(self._next_id, segment_id + 1)

    def truncate(self, segment_id: int, size_bytes: int) -> None:
        """Cut off what follows the last batch of a segment found at start."""
        self.folder.truncate(segment_id, size_bytes)
        self.used_bytes -= self.sizes_bytes[segment_id] - size_bytes
        self.sizes_bytes[segment_id] = size_bytes

    def reclaim_oldest(self) -> int | None:
        """Delete the oldest segment; its id, or None when there is none."""
        segment_id = next(iter(self.sizes_bytes), None)
        if segment_id is not None:
            self.discard(segment_id)
        return segment_id

    def discard(self, segment_id: int) -> None:
        """Delete one segment."""
        with self._lock:
            self.used_bytes -= self.sizes_bytes.pop(segment_id)
            self.folder.remove(segment_id)

    def reclaim_to(self, limit_bytes: int) -> list[int]:
        """Delete oldest segments until our files take no more than `limit_bytes`; their ids."""
        dropped = []
        while self.used_bytes > limit_bytes:
            segment_id = self.reclaim_oldest()
            if segment_id is None:
                break
            dropped.append(segment_id)
        return dropped

    def create(self, min_bytes: int, dropped: list[int]) -> OpenSegment:
        """A new segment, after reclaiming as much as cap and disk ask for (ids go to `dropped`, also when it
        fails). NoRoom when there is none to be had, OSError when the disk is broken."""
        size_bytes = max(self.segment_bytes, min_bytes)
        if size_bytes > self.capacity_bytes:
            raise NoRoom(f"a batch of {size_bytes} bytes is over the cap of {self.capacity_bytes}")
        dropped += self.reclaim_to(self.capacity_bytes - size_bytes)
        while True:
            try:
                return self._create(size_bytes)
            except OSError as error:
                if error.errno not in NO_ROOM_ERRNOS:
                    raise
                # Over the cap is our own doing; here somebody else filled the disk, or a limit is in force.
                segment_id = self.reclaim_oldest() if error.errno in RECLAIM_ERRNOS else None
                if segment_id is None:
                    raise NoRoom(f"{self.folder.path}: {error.strerror}") from error
                dropped.append(segment_id)

    def _create(self, size_bytes: int) -> OpenSegment:
        segment_id = self._next_id
        place = self.folder.create(segment_id, size_bytes)
        self.adopt(segment_id, size_bytes)
        return OpenSegment(segment_id, place, size_bytes)

    def close(self, segment: OpenSegment) -> None:
        """Nothing more is appended: give back the unused end. `settle` has to follow."""
        used_bytes = segment.contents.used_bytes
        with self._lock:
            self.folder.truncate(segment.segment_id, used_bytes)
            self.used_bytes -= self.sizes_bytes[segment.segment_id] - used_bytes
            self.sizes_bytes[segment.segment_id] = used_bytes

    def settle(self, segment: OpenSegment) -> None:
        """Make a closed segment durable and write the snapshot of its index. From any thread: it may take
        long, and appending to the next segment must not wait for it."""
        try:
            self.io.sync(segment.fd)
        except OSError as error:
            log.warning("%s: not synced: %s", self.folder.name(segment.segment_id), error)
        finally:
            os.close(segment.fd)
        self.write_snapshot(segment.segment_id, segment.contents)

    def write_snapshot(self, segment_id: int, contents: Contents) -> None:
        """Without a snapshot the segment is scanned at start, so failing to write one only costs time
        then."""
        body = encode_body(BatchBody(list(contents.records.values()), list(contents.removed)))
        digest = xxhash.xxh3_64_intdigest(body)
        prelude = Prelude(len(body), segment_id, 0, contents.last_sequence, contents.used_bytes, digest)
        try:
            self.folder.write_snapshot(segment_id, encode_prelude(SNAPSHOT_MAGIC, prelude) + body)
            with self._lock:
                # It may have been reclaimed meanwhile.
                self.folder.publish_snapshot(segment_id, wanted=segment_id in self.sizes_bytes)
        except OSError as error:
            log.warning("%s: no index snapshot written: %s", self.folder.name(segment_id), error)
            with contextlib.suppress(OSError):
                self.folder.publish_snapshot(segment_id, wanted=False)
