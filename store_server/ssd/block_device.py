"""Where one path keeps its segments: slots of a block device without a file system, for example a namespace
attached by NVMe over Fabrics.

Page 0 says that the device is ours, how large its slots are and of which generation it is. Behind it lie the
slots: a header page, which names the segment and how far it reaches, then the segment. What is left of an
older segment in a slot is told apart by the segment's id in each of its batches. Snapshots of indexes are not
kept: a restart reads the headers of the batches instead, one page for every few MB.
"""

import errno
import os
import struct
import threading
from pathlib import Path

import xxhash

from kvcore.errors import ConfigError
from kvcore.units import format_size
from store_server.ssd.aligned import AlignedBuffer
from store_server.ssd.disk_io import DiskIo, read_all, write_all
from store_server.ssd.folder import Place, claim
from store_server.ssd.format import PAGE_BYTES
from store_server.ssd.generation import Generation

_DEVICE_MAGIC, _SLOT_MAGIC = b"MCKVDEV1", b"MCKVSLT1"
_RECORD = struct.Struct("<8sQQ")  # magic, two numbers; xxh3-64 of that follows
_DIGEST = struct.Struct("<Q")
_STILL_OPEN = 0
_GENERATION_BITS = 32  # of each of its two numbers
# Of a batch of one object with thousands of layers, a checksum each.
_HEADER_ROOM_BYTES = 32 * PAGE_BYTES


def is_block_device(path: Path) -> bool:
    """Or a plain file, which is used in the same way."""
    return path.is_block_device() or path.is_file()


def slot_bytes_of(path: Path) -> int | None:
    """How large the slots of a store's device are; None for one that is not a store's."""
    with path.open("rb") as file:
        found = _decode(file.read(PAGE_BYTES), _DEVICE_MAGIC)
    return found[0] if found is not None else None


class BlockDevice:
    """Implements Folder. Uses no more than `capacity_bytes` of the device."""

    def __init__(self, path: Path, capacity_bytes: int, slot_bytes: int, io: DiskIo) -> None:
        self.path = path
        self.max_object_bytes = slot_bytes - _HEADER_ROOM_BYTES
        self._capacity_bytes = capacity_bytes
        self._slot_bytes = slot_bytes
        self._io = io
        self._fd = -1
        self._lock_fd = -1
        self._num_slots = 0
        self._page = AlignedBuffer(PAGE_BYTES).take(PAGE_BYTES)
        self._guard = threading.Lock()
        self._slots: dict[int, int] = {}  # by segment id
        self._sizes_bytes: dict[int, int] = {}

    def lock(self) -> None:
        """ConfigError when it holds something that is not ours: nothing of it has been changed."""
        self._lock_fd = claim(self.path, os.O_RDWR, self.path)
        try:
            self._fd = self._io.open(self.path, os.O_RDWR)
            room_bytes = min(os.lseek(self._fd, 0, os.SEEK_END), self._capacity_bytes) - PAGE_BYTES
            self._num_slots = room_bytes // (PAGE_BYTES + self._slot_bytes)
            if self._num_slots < 2:
                raise ConfigError(
                    f"{self.path} has no room for two segments of {format_size(self._slot_bytes)}"
                )
            self._claim_device()
            self._find_segments()
        except BaseException:
            self.unlock()
            raise

    def unlock(self) -> None:
        for fd in (self._fd, self._lock_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._lock_fd = -1

    def ids(self) -> list[int]:
        return sorted(self._slots)

    def name(self, segment_id: int) -> str:
        return f"segment {segment_id} of {self.path}"

    def size_bytes(self, segment_id: int) -> int:
        self._slot_of(segment_id)
        return self._sizes_bytes[segment_id] or self._slot_bytes

    def create(self, segment_id: int, size_bytes: int) -> Place:
        if size_bytes > self._slot_bytes:
            raise OSError(errno.EFBIG, f"no slot of {self.path} holds {format_size(size_bytes)}")
        with self._guard:
            taken = set(self._slots.values())
            slot = next((slot for slot in range(self._num_slots) if slot not in taken), None)
            if slot is None:
                raise OSError(errno.ENOSPC, f"all slots of {self.path} are taken")
            self._write(self._begin(slot), _SLOT_MAGIC, segment_id, _STILL_OPEN)
            self._slots[segment_id], self._sizes_bytes[segment_id] = slot, _STILL_OPEN
        return Place(self._io.open(self.path, os.O_RDWR), self._begin(slot) + PAGE_BYTES)

    def open(self, segment_id: int) -> Place:
        slot = self._slot_of(segment_id)
        return Place(self._io.open(self.path, os.O_RDONLY), self._begin(slot) + PAGE_BYTES)

    def truncate(self, segment_id: int, size_bytes: int) -> None:
        with self._guard:
            self._write(self._begin(self._slot_of(segment_id)), _SLOT_MAGIC, segment_id, size_bytes)
            self._sizes_bytes[segment_id] = size_bytes

    def remove(self, segment_id: int) -> None:
        with self._guard:
            slot = self._slots.pop(segment_id, None)
            self._sizes_bytes.pop(segment_id, None)
            if slot is not None:
                self._write(self._begin(slot), bytes(len(_SLOT_MAGIC)), 0, 0)

    def read_snapshot(self, segment_id: int) -> bytes | None:
        return None

    def write_snapshot(self, segment_id: int, data: bytes) -> None:
        """None are kept."""

    def publish_snapshot(self, segment_id: int, *, wanted: bool) -> None:
        """None are kept."""

    def clear_leftovers(self) -> None:
        """A crash leaves none: a slot is taken or free by one write of a page."""

    def read_generation(self) -> Generation:
        with self._guard:
            found = self._read(0, _DEVICE_MAGIC)
        if found is None:
            return Generation()
        return Generation(found[1] >> _GENERATION_BITS, found[1] & (1 << _GENERATION_BITS) - 1)

    def write_generation(self, generation: Generation) -> None:
        packed = generation.number << _GENERATION_BITS | generation.last_removal
        with self._guard:
            self._write(0, _DEVICE_MAGIC, self._slot_bytes, packed)
            self._io.sync(self._fd)

    def _claim_device(self) -> None:
        found = self._read(0, _DEVICE_MAGIC)
        if found is None:
            if any(self._page):
                raise ConfigError(
                    f"{self.path} is not empty and not a store's: if nobody needs what is on it, clear its "
                    f"beginning (wipefs -a {self.path}; dd if=/dev/zero of={self.path} bs=4096 count=1)"
                )
            self._write(0, _DEVICE_MAGIC, self._slot_bytes, 0)
        elif found[0] != self._slot_bytes:
            raise ConfigError(
                f"{self.path} was laid out with slots of {format_size(found[0])}, not "
                f"{format_size(self._slot_bytes)}: give the capacity it had, or clear its first 4096 bytes"
            )

    def _find_segments(self) -> None:
        self._slots.clear()
        for slot in range(self._num_slots):
            found = self._read(self._begin(slot), _SLOT_MAGIC)
            if found is not None:
                self._slots[found[0]], self._sizes_bytes[found[0]] = slot, found[1]

    def _slot_of(self, segment_id: int) -> int:
        slot = self._slots.get(segment_id)
        if slot is None:
            raise FileNotFoundError(errno.ENOENT, self.name(segment_id))
        return slot

    def _begin(self, slot: int) -> int:
        return PAGE_BYTES + slot * (PAGE_BYTES + self._slot_bytes)

    def _read(self, offset_bytes: int, magic: bytes) -> tuple[int, int] | None:
        """The two numbers of a page of ours; what was read stays in `_page`."""
        read_all(self._io, self._fd, [self._page], offset_bytes)
        return _decode(bytes(self._page), magic)

    def _write(self, offset_bytes: int, magic: bytes, first: int, second: int) -> None:
        record = _RECORD.pack(magic, first, second)
        self._page[:] = bytes(PAGE_BYTES)
        self._page[: _RECORD.size] = record
        _DIGEST.pack_into(self._page, _RECORD.size, xxhash.xxh3_64_intdigest(record))
        write_all(self._io, self._fd, [self._page], offset_bytes)


def _decode(page: bytes, magic: bytes) -> tuple[int, int] | None:
    if len(page) < PAGE_BYTES:
        return None
    record = page[: _RECORD.size]
    (digest,) = _DIGEST.unpack_from(page, _RECORD.size)
    found, first, second = _RECORD.unpack(record)
    return (first, second) if found == magic and digest == xxhash.xxh3_64_intdigest(record) else None
