"""What lies on the remote, as far as this store knows: what it wrote itself and what listings have shown."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from kvcore.wire.messages import Tier
from store_server.core.tiering import ColdObject
from store_server.remote.format import parse_name

BYTES_PER_KEY = 200
"""Estimate of what an entry with a 32-byte key takes (tests hold it against what Python takes)."""

_SIZE_BITS, _LAYER_BITS = 48, 24


class RemoteIndex:
    """In the order of last use. `max_keys` bounds the memory: what is beyond it is not known here, which is
    a miss."""

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._entries: OrderedDict[bytes, int] = OrderedDict()
        self._listing = 0
        # While a listing is under way it may still show what has been removed since it began.
        self._removed_since: set[bytes] | None = None
        self.size_bytes = 0
        self.num_unknown = 0
        """Objects that the last listings showed and that found no place here."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._entries)

    @property
    def memory_bytes(self) -> int:
        return BYTES_PER_KEY * len(self._entries)

    def find(self, key: bytes) -> ColdObject | None:
        packed = self._entries.get(key)
        return None if packed is None else _unpack(packed)

    def touch(self, key: bytes) -> None:
        """It is being read."""
        self._entries.move_to_end(key)

    def add(self, key: bytes, place: ColdObject) -> list[bytes]:
        """This store has written it. Returns what is forgotten for it."""
        self.remove(key)
        forgotten = []
        while len(self._entries) >= self._max_keys:
            forgotten.append(self.oldest())
            self._pop(forgotten[-1])
        self._insert(key, place)
        return forgotten

    def remove(self, key: bytes) -> ColdObject | None:
        """It is no longer there."""
        if self._removed_since is not None:
            self._removed_since.add(key)
        return self._pop(key)

    def oldest(self) -> bytes:
        return next(iter(self._entries))

    # ---- listings --------------------------------------------------------------------------------------

    def listing_begins(self) -> None:
        self._listing += 1
        self._removed_since = set()
        self.num_unknown = 0

    def listed(self, names: Iterable[str]) -> list[bytes]:
        """Some of what is there. Returns the keys that are new here."""
        new: list[bytes] = []
        assert self._removed_since is not None
        for name in names:
            entry = parse_name(name)
            if entry is None or entry[0] in self._removed_since:
                continue
            key, place = entry
            if key in self._entries:
                self.size_bytes += place.size_bytes - _unpack(self._entries[key]).size_bytes
                self._entries[key] = self._pack(place)
            elif len(self._entries) < self._max_keys:
                self._insert(key, place)
                new.append(key)
            else:
                self.num_unknown += 1
        return new

    def listing_ends(self, is_complete: bool) -> list[bytes]:
        """Returns what was here and is not there any more; a listing that broke off says nothing about
        that."""
        self._removed_since = None
        if not is_complete:
            return []
        gone = [
            key
            for key, packed in self._entries.items()
            if packed >> (_SIZE_BITS + _LAYER_BITS) < self._listing
        ]
        for key in gone:
            self.remove(key)
        return gone

    # ---- inside ----------------------------------------------------------------------------------------

    def _pop(self, key: bytes) -> ColdObject | None:
        """It is there, perhaps, but not known any more: a listing under way may find it again."""
        packed = self._entries.pop(key, None)
        if packed is None:
            return None
        place = _unpack(packed)
        self.size_bytes -= place.size_bytes
        return place

    def _insert(self, key: bytes, place: ColdObject) -> None:
        if self._removed_since is not None:
            self._removed_since.discard(key)
        self._entries[key] = self._pack(place)
        self.size_bytes += place.size_bytes

    def _pack(self, place: ColdObject) -> int:
        """One number, which the garbage collector need not visit."""
        return (self._listing << _LAYER_BITS | place.num_layers) << _SIZE_BITS | place.size_bytes


def _unpack(packed: int) -> ColdObject:
    num_layers = packed >> _SIZE_BITS & ((1 << _LAYER_BITS) - 1)
    return ColdObject(packed & ((1 << _SIZE_BITS) - 1), num_layers, Tier.REMOTE)
