"""Key to object, and a way to page through all of them."""

from collections.abc import Sequence
from itertools import count

from kvcore.errors import RequestRefused
from kvcore.wire.messages import ErrorCode, KeyInfo, ListKeys, ListKeysReply, Tier
from store_server.core.objects import METADATA_BYTES_PER_LAYER, METADATA_BYTES_PER_OBJECT, StoredObject
from store_server.core.tiering import ColdTier

_MAX_OPEN_LISTINGS = 8
_POSITION_BITS = 40


class Catalog:
    """The objects that can be found, reserved and sealed. `by_key` may be read by anyone and is changed only
    here. `policy_bytes_per_object`: what an object costs the eviction policy."""

    def __init__(self, policy_bytes_per_object: int) -> None:
        self._bytes_per_object = METADATA_BYTES_PER_OBJECT + policy_bytes_per_object
        self.by_key: dict[bytes, StoredObject] = {}
        # The few that are being written or loaded, so that asking for many keys need not look at each object.
        self._unsealed: set[bytes] = set()
        self.metadata_bytes = 0
        # A page is a slice of a snapshot: walking a dict that changes between pages would skip keys, and
        # finding the place again would cost O(n) for each page.
        self._listings: dict[int, tuple[bytes, list[bytes]]] = {}
        self._listing_numbers = count(1)

    def add(self, obj: StoredObject) -> None:
        self.by_key[obj.key] = obj
        self._unsealed.add(obj.key)
        self.metadata_bytes += self.bytes_of(obj)

    def remove(self, obj: StoredObject) -> None:
        del self.by_key[obj.key]
        self._unsealed.discard(obj.key)
        self.metadata_bytes -= self.bytes_of(obj)

    def sealed(self, objects: Sequence[StoredObject]) -> None:
        """These are complete."""
        self._unsealed.difference_update([obj.key for obj in objects])

    def has_all(self, keys: Sequence[bytes]) -> bool:
        """Whether each of them is here and complete; at the speed of C, for this is asked most."""
        return self._unsealed.isdisjoint(keys) and all(map(self.by_key.__contains__, keys))

    def bytes_of(self, obj: StoredObject) -> int:
        """What the bookkeeping of an object takes."""
        return self._bytes_per_object + METADATA_BYTES_PER_LAYER * obj.num_layers

    def list_keys(self, request: ListKeys, cold: ColdTier, prefix: bytes = b"") -> ListKeysReply:
        """Objects that came after cursor 0 was asked for are not listed, those that went since neither.
        `prefix`: that of the tenant who asks, which is told its own objects, by its own keys."""
        if request.limit < 1:
            raise RequestRefused(ErrorCode.BAD_REQUEST, f"limit must be at least 1, not {request.limit}")
        number, position = request.cursor >> _POSITION_BITS, request.cursor & ((1 << _POSITION_BITS) - 1)
        if request.cursor == 0:
            number = next(self._listing_numbers)
            keys = [*self.by_key, *(key for key in cold if key not in self.by_key)]
            self._listings[number] = (
                prefix,
                [key for key in keys if key.startswith(prefix)] if prefix else keys,
            )
            while len(self._listings) > _MAX_OPEN_LISTINGS:
                del self._listings[next(iter(self._listings))]
        asker, keys = self._listings.get(number, (None, []))
        if asker != prefix:
            raise RequestRefused(ErrorCode.BAD_REQUEST, "this listing is over, begin again with cursor 0")
        end = position + request.limit
        page = [info for key in keys[position:end] if (info := self.describe(key, cold, len(prefix)))]
        if end < len(keys):
            return ListKeysReply(request.id, page, (number << _POSITION_BITS) | end)
        del self._listings[number]
        return ListKeysReply(request.id, page, 0)

    def describe(self, key: bytes, cold: ColdTier, skipped_bytes: int) -> KeyInfo | None:
        """The first `skipped_bytes` of the key are left out: the asker does not know them."""
        name = key[skipped_bytes:]
        obj = self.by_key.get(key)
        if (obj is None or not obj.is_sealed) and (place := cold.find(key)):
            copies = cold.tiers_of(key)
            return KeyInfo(
                name, place.size_bytes, place.num_layers, place.num_layers, place.tier, 0, 0, copies
            )
        if obj is None:
            return None
        return KeyInfo(
            key=name,
            size_bytes=obj.size_bytes,
            num_layers=obj.num_layers,
            layers_ready=obj.layers_ready,
            tier=Tier.DRAM,
            pin=obj.pin,
            num_leases=obj.leases,
            copies=bytes([Tier.DRAM]) + cold.tiers_of(key) if obj.is_sealed else b"",
        )
