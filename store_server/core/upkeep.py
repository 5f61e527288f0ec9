"""What operators and tools ask for: pins, removal, listing."""

from kvcore.errors import RequestRefused
from kvcore.wire.messages import (
    Describe,
    DescribeReply,
    ErrorCode,
    KeyInfo,
    ListKeys,
    ListKeysReply,
    Pin,
    PinKind,
    Remove,
    Status,
    StatusReply,
    Tier,
    Unpin,
)
from store_server.core.catalog import Catalog
from store_server.core.promotion import Promotions
from store_server.core.space import Space
from store_server.core.tiering import ColdTier
from store_server.core.writes import Writes


class Upkeep:
    def __init__(
        self, catalog: Catalog, space: Space, writes: Writes, promotions: Promotions, cold: ColdTier
    ) -> None:
        self._catalog = catalog
        self._space = space
        self._writes = writes
        self._promotions = promotions
        self._cold = cold

    def pin(self, request: Pin, now: float) -> StatusReply:
        """Pinning again replaces the kind and the time to live. An object on disk is brought back to be
        pinned in DRAM: PENDING when there is no room for it yet."""
        try:
            kind = PinKind(request.kind)
        except ValueError:
            raise RequestRefused(ErrorCode.BAD_REQUEST, f"no such kind of pin: {request.kind}") from None
        statuses = bytearray(len(request.keys))
        for index, key in enumerate(request.keys):
            is_coming = self._promotions.want(key)
            obj = self._catalog.by_key.get(key)
            if obj is None:
                statuses[index] = Status.PENDING if is_coming else Status.MISSING
            else:
                self._space.pin(obj, kind, now + request.ttl_ms / 1e3)
        return StatusReply(request.id, bytes(statuses))

    def unpin(self, request: Unpin) -> StatusReply:
        statuses = bytearray(len(request.keys))
        for index, key in enumerate(request.keys):
            obj = self._catalog.by_key.get(key)
            if obj is None:
                statuses[index] = Status.MISSING
            else:
                self._space.unpin(obj)
        return StatusReply(request.id, bytes(statuses))

    def remove(self, request: Remove) -> StatusReply:
        """Without `force` an object that is pinned, leased or still being written stays. With it the name is
        gone at once, the bytes only when their last reader is done."""
        statuses = bytearray(len(request.keys))
        cold_keys = []
        for index, key in enumerate(request.keys):
            obj = self._catalog.by_key.get(key)
            is_cold = self._cold.find(key) is not None
            if obj is None and not is_cold:
                statuses[index] = Status.MISSING
            elif obj is not None and not request.force and (obj.pin or obj.leases):
                statuses[index] = Status.LEASED
            elif obj is None or self._promotions.is_loading(key):
                self._promotions.forget(key)
                cold_keys.append(key)
            elif obj.is_sealed:
                self._space.discard(obj)
                # Not only if it is there: it may be on its way.
                cold_keys.append(key)
            elif request.force:
                self._writes.abandon(key)
            else:
                statuses[index] = Status.PENDING
        gone = [
            key
            for key, status in zip(request.keys, statuses, strict=True)
            if status in (Status.OK, Status.MISSING)
        ]
        if gone:
            self._cold.note_removal(gone)
        if cold_keys:
            self._cold.remove(cold_keys)
        return StatusReply(request.id, bytes(statuses))

    def list_keys(self, request: ListKeys, prefix: bytes = b"") -> ListKeysReply:
        return self._catalog.list_keys(request, self._cold, prefix)

    def describe(self, request: Describe, prefix: bytes = b"") -> DescribeReply:
        """`prefix`: that of the tenant who asks; its keys in the request begin so, those in the answer do
        not."""
        infos = [self._catalog.describe(key, self._cold, len(prefix)) for key in request.keys]
        return DescribeReply(
            request.id,
            [
                KeyInfo(key[len(prefix) :], 0, 0, 0, Tier.NONE, 0, 0) if info is None else info
                for key, info in zip(request.keys, infos, strict=True)
            ],
        )
