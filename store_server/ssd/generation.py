"""What tells a disk that was out of service from the others when it comes back: has anything been removed in
the meantime that it could not be told?

Every start of a store, and every failure of a disk, begins a new generation, which all disks in service note.
They also note the last generation in which a client had something removed. So a disk whose own generation is
older than that has missed removals. What it holds then goes as a whole: it is a cache, and to keep a list of
what was removed would take any amount of room. Pure.
"""

import struct
from typing import NamedTuple

import xxhash

from store_server.ssd.format import PAGE_BYTES

_MAGIC = b"MCKVGEN1"
_RECORD = struct.Struct("<8sQQ")
_DIGEST = struct.Struct("<Q")


class Generation(NamedTuple):
    """`last_removal`: the generation of the last removal, 0 when there was none."""

    number: int = 0
    last_removal: int = 0

    def has_missed(self, newest_removal: int) -> bool:
        """Of a disk that notes this, among disks of which one knows of that removal."""
        return self.number < newest_removal

    def next(self) -> "Generation":
        return self._replace(number=self.number + 1)

    def with_removal(self) -> "Generation":
        return self._replace(last_removal=self.number)

    def without_trust(self) -> "Generation":
        """For the disk itself that missed a removal, should it still take this much."""
        return Generation(0, max(self.last_removal, 1))


def encode_generation(generation: Generation) -> bytes:
    """One page, of which one sector matters: it is written as a whole or not at all."""
    record = _RECORD.pack(_MAGIC, *generation)
    page = record + _DIGEST.pack(xxhash.xxh3_64_intdigest(record))
    return page + bytes(PAGE_BYTES - len(page))


def decode_generation(page: bytes) -> Generation:
    """What cannot be read counts as old."""
    if len(page) >= _RECORD.size + _DIGEST.size:
        record = page[: _RECORD.size]
        magic, number, last_removal = _RECORD.unpack(record)
        (digest,) = _DIGEST.unpack_from(page, _RECORD.size)
        if magic == _MAGIC and digest == xxhash.xxh3_64_intdigest(record):
            return Generation(number, last_removal)
    return Generation()
