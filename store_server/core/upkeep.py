"""What operators and tools ask for: pins, removal, listing."""

from kvcore.errors import RequestRefused
from kvcore.wire.messages import (
    ErrorCode,
    ListKeys,
    ListKeysReply,
    Pin,
    PinKind,
    Remove,
    Status,
    StatusReply,
    Unpin,
)
from store_server.core.catalog import Catalog
from store_server.core.space import Space
from store_server.core.writes import Writes


class Upkeep:
    def __init__(self, catalog: Catalog, space: Space, writes: Writes) -> None:
        self._catalog = catalog
        self._space = space
        self._writes = writes

    def pin(self, request: Pin, now: float) -> StatusReply:
        """Pinning again replaces the kind and the time to live."""
        try:
            kind = PinKind(request.kind)
        except ValueError:
            raise RequestRefused(ErrorCode.BAD_REQUEST, f"no such kind of pin: {request.kind}") from None
        statuses = bytearray(len(request.keys))
        for index, key in enumerate(request.keys):
            obj = self._catalog.by_key.get(key)
            if obj is None:
                statuses[index] = Status.MISSING
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
        for index, key in enumerate(request.keys):
            obj = self._catalog.by_key.get(key)
            if obj is None:
                statuses[index] = Status.MISSING
            elif not request.force and (obj.pin or obj.leases):
                statuses[index] = Status.LEASED
            elif obj.is_sealed:
                self._space.discard(obj)
            elif request.force:
                self._writes.abandon(key)
            else:
                statuses[index] = Status.PENDING
        return StatusReply(request.id, bytes(statuses))

    def list_keys(self, request: ListKeys) -> ListKeysReply:
        return self._catalog.list_keys(request)
