"""Where one path keeps its segments: files in a directory."""

import fcntl
import logging
import os
import re
from pathlib import Path
from typing import NamedTuple, Protocol

from kvcore.errors import ConfigError
from kvcore.units import format_size
from store_server.ssd.aligned import AlignedBuffer
from store_server.ssd.disk_io import DiskIo, read_all, write_all
from store_server.ssd.format import PAGE_BYTES
from store_server.ssd.generation import Generation, decode_generation, encode_generation

logger = logging.getLogger(__name__)

_SEGMENT_NAME = re.compile(r"^segment-(\d{12})\.kv$")


class Place(NamedTuple):
    """A segment begins at `base_bytes` of what `fd` opens. The descriptor is to be closed by whoever
    asked."""

    fd: int
    base_bytes: int


class Folder(Protocol):
    """All methods block and raise OSError when the disk is broken. Not thread-safe, but for `open`."""

    path: Path
    max_object_bytes: int
    """What is larger finds no place in any segment, however much is free."""

    def lock(self) -> None:
        """Claims it. ConfigError when another store uses it, or when it is not for us."""
        ...

    def unlock(self) -> None: ...

    def ids(self) -> list[int]:
        """Of the segments there, oldest first. What others have there is none of our business."""
        ...

    def name(self, segment_id: int) -> str:
        """For people."""
        ...

    def size_bytes(self, segment_id: int) -> int:
        """How far the segment may reach. FileNotFoundError when it is gone."""
        ...

    def create(self, segment_id: int, size_bytes: int) -> Place:
        """Room for a new segment, taken now; an errno of NO_ROOM_ERRNOS when there is none."""
        ...

    def open(self, segment_id: int) -> Place:
        """For reading. FileNotFoundError when it is gone."""
        ...

    def truncate(self, segment_id: int, size_bytes: int) -> None:
        """Nothing is kept behind `size_bytes`."""
        ...

    def remove(self, segment_id: int) -> None: ...

    def read_snapshot(self, segment_id: int) -> bytes | None: ...

    def write_snapshot(self, segment_id: int, data: bytes) -> None:
        """As good as not there until `publish_snapshot`. Nothing happens where snapshots are not kept."""
        ...

    def publish_snapshot(self, segment_id: int, *, wanted: bool) -> None:
        """Or forgets it."""
        ...

    def clear_leftovers(self) -> None:
        """Of a crash."""
        ...

    def read_generation(self) -> Generation:
        """That of a path that has noted none is the oldest of all."""
        ...

    def write_generation(self, generation: Generation) -> None:
        """Durable when it returns."""
        ...


class Directory:
    """Implements Folder. Makes the directory when it is claimed."""

    def __init__(self, path: Path, capacity_bytes: int, io: DiskIo) -> None:
        self.path = path
        self._capacity_bytes = capacity_bytes
        self.max_object_bytes = capacity_bytes // 2  # a segment grows with what it is to hold
        self._io = io
        self._lock_fd = -1

    def lock(self) -> None:
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        there = os.statvfs(self.path)
        if self._capacity_bytes > there.f_frsize * there.f_blocks:
            logger.warning(
                "the file system of %s has %s, less than its capacity of %s: is the disk mounted?",
                self.path,
                format_size(there.f_frsize * there.f_blocks),
                format_size(self._capacity_bytes),
            )
        self._lock_fd = claim(self.path / "lock", os.O_RDWR | os.O_CREAT, self.path)

    def unlock(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def ids(self) -> list[int]:
        names = (_SEGMENT_NAME.match(path.name) for path in self.path.iterdir())
        return sorted(int(match[1]) for match in names if match)

    def name(self, segment_id: int) -> str:
        return str(self._segment(segment_id))

    def size_bytes(self, segment_id: int) -> int:
        return self._segment(segment_id).stat().st_size

    def create(self, segment_id: int, size_bytes: int) -> Place:
        path = self._segment(segment_id)
        fd = self._io.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            self._io.allocate(fd, size_bytes)
        except OSError:
            os.close(fd)
            path.unlink()
            raise
        return Place(fd, 0)

    def open(self, segment_id: int) -> Place:
        return Place(self._io.open(self._segment(segment_id), os.O_RDONLY), 0)

    def truncate(self, segment_id: int, size_bytes: int) -> None:
        os.truncate(self._segment(segment_id), size_bytes)

    def remove(self, segment_id: int) -> None:
        # The snapshot goes first: it must never outlive its segment and describe a later one.
        self._snapshot(segment_id).unlink(missing_ok=True)
        self._segment(segment_id).unlink(missing_ok=True)

    def read_snapshot(self, segment_id: int) -> bytes | None:
        try:
            return self._snapshot(segment_id).read_bytes()
        except FileNotFoundError:
            return None

    def write_snapshot(self, segment_id: int, data: bytes) -> None:
        with open(self._partial(segment_id), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def publish_snapshot(self, segment_id: int, *, wanted: bool) -> None:
        partial = self._partial(segment_id)
        if wanted:
            partial.replace(self._snapshot(segment_id))
        else:
            partial.unlink(missing_ok=True)

    def clear_leftovers(self) -> None:
        """Snapshots that a crash left half written, or without their segment."""
        for path in self.path.glob("segment-*.index*"):
            if not path.name.endswith(".index") or not path.with_suffix(".kv").exists():
                path.unlink()

    def read_generation(self) -> Generation:
        try:
            fd = self._io.open(self._generation, os.O_RDONLY)
        except FileNotFoundError:
            return Generation()
        try:
            page = AlignedBuffer(PAGE_BYTES).take(PAGE_BYTES)
            return decode_generation(bytes(page[: read_all(self._io, fd, [page], 0)]))
        finally:
            os.close(fd)

    def write_generation(self, generation: Generation) -> None:
        # In place: a full disk has no room for a new file.
        fd = self._io.open(self._generation, os.O_RDWR | os.O_CREAT)
        try:
            page = AlignedBuffer(PAGE_BYTES).take(PAGE_BYTES)
            page[:] = encode_generation(generation)
            write_all(self._io, fd, [page], 0)
            self._io.sync(fd)
        finally:
            os.close(fd)

    @property
    def _generation(self) -> Path:
        return self.path / "generation"

    def _segment(self, segment_id: int) -> Path:
        return self.path / f"segment-{segment_id:012d}.kv"

    def _snapshot(self, segment_id: int) -> Path:
        return self.path / f"segment-{segment_id:012d}.index"

    def _partial(self, segment_id: int) -> Path:
        return self._snapshot(segment_id).with_suffix(".index.tmp")


def claim(path: Path, flags: int, name: Path) -> int:
    """A descriptor that holds the lock on `path`. ConfigError when another store has it."""
    fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise ConfigError(
            f"{name} is in use by another store; give each store SSD paths of its own"
        ) from None
    return fd
