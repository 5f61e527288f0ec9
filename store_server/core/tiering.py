"""DRAM and what is below it: what leaves DRAM is written back first, what is wanted again is brought back.

Pure: disks and remotes are behind `ColdTier`, which takes work at once; the shell reports the end of it to
Space.written, Space.no_longer_cold and Promotions.loaded.

An object that eviction chose departs: it leaves the eviction order and is written back unless the cold tier
has it already. Until its bytes are needed it stays readable in DRAM; whoever uses it meanwhile brings it back
into the order. So a put that needs room takes the bytes of an object that is on disk, at once, and waits only
when writers are faster than the disk.
"""

import enum
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from kvcore.wire.messages import Tier
from store_server.core.objects import StoredObject


class Acceptance(enum.Enum):
    QUEUED = "queued"  # the end of it will be reported
    BUSY = "busy"  # the queues are full: keep the object and ask again when something has been written
    REFUSED = "refused"  # it cannot be taken: too large, full, or failed


class ColdObject(NamedTuple):
    size_bytes: int
    num_layers: int
    tier: Tier = Tier.SSD


class ColdTier(Protocol):
    """Objects below DRAM: on disk, or on a remote. No method blocks."""

    @property
    def delays_writers(self) -> bool:
        """Whether a put waits until this tier has taken what makes room for it. A tier that is too slow for
        that gets what eviction in the background offers, and a put takes the bytes it needs at once."""
        ...

    def __len__(self) -> int: ...

    @property
    def metadata_bytes(self) -> int:
        """Memory that its index takes."""
        ...

    def find(self, key: bytes) -> ColdObject | None: ...

    def __iter__(self) -> Iterator[bytes]:
        """All keys."""
        ...

    def has_copy(self, key: bytes) -> bool:
        """Whether an object that leaves DRAM need not be written: it is where it would go."""
        ...

    def tiers_of(self, key: bytes) -> bytes:
        """The tiers that hold it, one byte each."""
        ...

    def write_back(self, obj: StoredObject) -> Acceptance:
        """QUEUED: the object's bytes must not change until `Space.written`."""
        ...

    def load(self, obj: StoredObject) -> bool:
        """Fill the object's extents; `Promotions.loaded` follows. False when it is not there."""
        ...

    def note_removal(self, keys: Sequence[bytes]) -> None:
        """A client has these removed for good, also where they cannot be seen now; `remove` follows for those
        that can."""
        ...

    def remove(self, keys: Sequence[bytes]) -> None: ...


class NoColdTier:
    """DRAM only."""

    metadata_bytes = 0
    delays_writers = False

    def __len__(self) -> int:
        return 0

    def find(self, key: bytes) -> ColdObject | None:
        return None

    def __iter__(self) -> Iterator[bytes]:
        return iter(())

    def has_copy(self, key: bytes) -> bool:
        return False

    def tiers_of(self, key: bytes) -> bytes:
        return b""

    def write_back(self, obj: StoredObject) -> Acceptance:
        return Acceptance.REFUSED

    def load(self, obj: StoredObject) -> bool:
        return False

    def note_removal(self, keys: Sequence[bytes]) -> None:
        pass

    def remove(self, keys: Sequence[bytes]) -> None:
        pass


class Fate(enum.Enum):
    """What becomes of an object that eviction chose."""

    STORED = "stored"  # it is in the cold tier: its bytes may go, and nothing is lost
    REFUSED = "refused"  # the cold tier does not take it: its bytes may go, and the object with them
    DEPARTED = "departed"  # it is being written back
    WAIT = "wait"  # it has to stay until the cold tier takes more


class WriteBack:
    """Objects in DRAM that have left the eviction order: those being written, and those that are ready to
    go."""

    def __init__(self, cold: ColdTier) -> None:
        self._cold = cold
        self._in_flight: dict[bytes, StoredObject] = {}
        self._ready: OrderedDict[bytes, StoredObject] = OrderedDict()
        self.in_flight_bytes = 0
        self.ready_bytes = 0

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def in_flight_bytes_of(self, owner: bytes) -> int:
        """Of the objects whose keys begin so. There are never many in flight."""
        return sum(obj.size_bytes for key, obj in self._in_flight.items() if key.startswith(owner))

    def __contains__(self, key: bytes) -> bool:
        return key in self._in_flight or key in self._ready

    def __len__(self) -> int:
        return len(self._in_flight) + len(self._ready)

    def decide(self, obj: StoredObject) -> Fate:
        """On DEPARTED the caller takes the object out of the eviction order."""
        if self._cold.has_copy(obj.key):
            return Fate.STORED
        acceptance = self._cold.write_back(obj)
        if acceptance is Acceptance.QUEUED:
            obj.users += 1  # keeps the bytes in place even if the object is removed meanwhile
            self._in_flight[obj.key] = obj
            self.in_flight_bytes += obj.size_bytes
            return Fate.DEPARTED
        return Fate.WAIT if acceptance is Acceptance.BUSY else Fate.REFUSED

    def set_ready(self, obj: StoredObject) -> None:
        """It is in the cold tier and nobody has used it since it departed."""
        self._ready[obj.key] = obj
        self.ready_bytes += obj.size_bytes

    def first_ready(self, evictable: Callable[[StoredObject], bool]) -> StoredObject | None:
        """The one that departed longest ago of those that may go."""
        return next((obj for obj in self._ready.values() if evictable(obj)), None)

    def take_back(self, key: bytes) -> StoredObject | None:
        """It is wanted in DRAM again, or no longer in the cold tier, or gone altogether."""
        obj = self._in_flight.pop(key, None)
        if obj is not None:
            self.in_flight_bytes -= obj.size_bytes
            return obj
        obj = self._ready.pop(key, None)
        if obj is not None:
            self.ready_bytes -= obj.size_bytes
        return obj

    def ended(self, obj: StoredObject) -> bool:
        """Its write is over. False when somebody has taken it back meanwhile."""
        return self._in_flight.get(obj.key) is obj and self.take_back(obj.key) is obj
