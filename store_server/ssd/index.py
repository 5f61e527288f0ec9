"""Where every key lies. Lean: one dict entry a key whose value is packed bytes the garbage collector need not
visit."""

import struct
import sys
from collections.abc import Iterator, Sequence

from store_server.ssd.types import Location

_PLACE = struct.Struct("<HIQQI")


def _pack(location: Location, checksums: Sequence[int]) -> bytes:
    return _PLACE.pack(*location) + struct.pack(f"<{len(checksums)}Q", *checksums)


def _location(packed: bytes) -> Location:
    return Location(*_PLACE.unpack_from(packed))


class Index:
    """Owned by one thread (the loop). `live_bytes` are payload bytes of the objects in it."""

    def __init__(self) -> None:
        self._places: dict[bytes, bytes] = {}
        self._keys_of_segment: dict[tuple[int, int], list[bytes]] = {}
        self.live_bytes = 0
        self._packed_bytes = 0

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: bytes) -> bool:
        return key in self._places

    def location(self, key: bytes) -> Location | None:
        packed = self._places.get(key)
        return None if packed is None else _location(packed)

    def checksums(self, key: bytes) -> list[int]:
        packed = self._places[key]
        return list(struct.unpack_from(f"<{(len(packed) - _PLACE.size) // 8}Q", packed, _PLACE.size))

    def add(self, key: bytes, location: Location, checksums: Sequence[int]) -> None:
        """Also replaces: the newest place of a key is the right one."""
        self.remove(key)
        packed = _pack(location, checksums)
        self._places[key] = packed
        self._keys_of_segment.setdefault((location.disk, location.segment_id), []).append(key)
        self.live_bytes += location.size_bytes
        self._packed_bytes += len(packed)

    def remove(self, key: bytes) -> Location | None:
        packed = self._places.pop(key, None)
        if packed is None:
            return None
        location = _location(packed)
        self.live_bytes -= location.size_bytes
        self._packed_bytes -= len(packed)
        return location

    def remove_at(self, key: bytes, location: Location) -> bool:
        """Remove it only if it still lies there."""
        if self.location(key) != location:
            return False
        self.remove(key)
        return True

    def remove_segment(self, disk: int, segment_id: int) -> list[bytes]:
        """Forget all that lies in a segment; the keys. Keys that moved on since stay."""
        removed = []
        for key in self._keys_of_segment.pop((disk, segment_id), []):
            location = self.location(key)
            if location is not None and location[:2] == (disk, segment_id):
                self.remove(key)
                removed.append(key)
        return removed

    def remove_disk(self, disk: int) -> list[bytes]:
        segment_ids = [segment_id for number, segment_id in self._keys_of_segment if number == disk]
        return [key for segment_id in segment_ids for key in self.remove_segment(disk, segment_id)]

    def snapshot(self) -> list[tuple[bytes, Location]]:
        """All entries now; safe to take from another thread (one step of the interpreter copies the dict)."""
        return [(key, _location(packed)) for key, packed in self._places.copy().items()]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._places)

    def memory_bytes(self) -> int:
        """What the index takes, near enough to count it in a memory budget."""
        per_key_bytes = (
            sys.getsizeof(b"") * 2 + 32 + 8
        )  # key and value objects, the key's bytes, one list slot
        return sys.getsizeof(self._places) + self._packed_bytes + per_key_bytes * len(self._places)
