"""A cold tier made of dicts: what is queued ends when the test says so."""

from collections.abc import Iterator, Sequence

from kvcore.wire.messages import Status, Tier
from store_server.core.objects import StoredObject
from store_server.core.store import Store, StoreLimits
from store_server.core.tiering import Acceptance, ColdObject


class FakeCold:
    def __init__(self, queue_objects: int = 1_000_000) -> None:
        self.queue_objects = queue_objects
        self.is_refusing = False
        self.stored: dict[bytes, ColdObject] = {}
        self.writing: list[StoredObject] = []
        self.loading: list[StoredObject] = []
        self.cancelled: set[bytes] = set()
        self.noted: set[bytes] = set()
        self.metadata_bytes = 0
        self.delays_writers = True

    def __len__(self) -> int:
        return len(self.stored)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.stored)

    def find(self, key: bytes) -> ColdObject | None:
        return self.stored.get(key)

    def has_copy(self, key: bytes) -> bool:
        return key in self.stored

    def tiers_of(self, key: bytes) -> bytes:
        return bytes([Tier.SSD]) if key in self.stored else b""

    def write_back(self, obj: StoredObject) -> Acceptance:
        if self.is_refusing:
            return Acceptance.REFUSED
        if len(self.writing) >= self.queue_objects or any(other.key == obj.key for other in self.writing):
            return Acceptance.BUSY
        assert obj.is_sealed and obj.key not in self.stored
        self.writing.append(obj)
        return Acceptance.QUEUED

    def load(self, obj: StoredObject) -> bool:
        if obj.key not in self.stored:
            return False
        assert obj.size_bytes == sum(obj.extents[1::2])
        self.loading.append(obj)
        return True

    def note_removal(self, keys: Sequence[bytes]) -> None:
        self.noted.update(keys)

    def remove(self, keys: Sequence[bytes]) -> None:
        self.cancelled |= set(keys) & {obj.key for obj in self.writing}
        for key in keys:
            self.stored.pop(key, None)

    # ---- the disk, in the hands of the test ------------------------------------------------------------

    def finish_writes(self, store: Store, count: int = 1_000_000, status: Status = Status.OK) -> None:
        for obj in self.writing[:count]:
            self.writing.remove(obj)
            outcome = Status.ABANDONED if obj.key in self.cancelled else status
            self.cancelled.discard(obj.key)
            if outcome is Status.OK:
                self.stored[obj.key] = ColdObject(obj.size_bytes, obj.num_layers)
            store.space.written(obj, outcome)
        store.retry_for_room()

    def finish_loads(self, store: Store, count: int = 1_000_000, status: Status = Status.OK) -> None:
        for obj in self.loading[:count]:
            self.loading.remove(obj)
            outcome = status if obj.key in self.stored else Status.MISSING
            if outcome is Status.CORRUPT:
                del self.stored[obj.key]
            store.promotions.loaded(obj, outcome, [7] * obj.num_layers)
        store.retry_for_room()

    def lose(self, store: Store, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.stored.pop(key, None)
        store.space.no_longer_cold(keys)


def new_tiered_store(
    cold: FakeCold, pool_size_bytes: int = 1 << 20, slab_bytes: int = 64 << 10, **limits: float
) -> Store:
    values = {"high_watermark": 1.0, "low_watermark": 1.0, **limits}
    store_limits = StoreLimits(pool_size_bytes=pool_size_bytes, slab_bytes=slab_bytes, **values)  # type: ignore[arg-type]
    return Store(store_limits, cold)
