"""How objects are found and read. Looking takes no lease: it must never starve writers."""

import struct
from collections.abc import Sequence

from kvcore import metrics
from kvcore.errors import RequestRefused
from kvcore.wire.messages import (
    Ack,
    Acquire,
    AcquireReply,
    Await,
    ErrorCode,
    Exists,
    Grant,
    Lookup,
    LookupReply,
    Read,
    ReadReply,
    Release,
    Renew,
    Status,
    StatusReply,
    Tier,
)
from store_server.core.catalog import Catalog
from store_server.core.layers import Ticket, Waiters, WaitingRequest
from store_server.core.leases import Leases
from store_server.core.objects import Session, StoredObject
from store_server.core.promotion import Promotions
from store_server.core.space import Space
from store_server.core.spans import Span, layer_spans, merge_neighbours
from store_server.core.tiering import ColdTier


class Served:
    """An answered Read: its payload is `spans` of the pool. `objects` count as used until the shell has sent
    the payload and gives them to `Space.release`."""

    __slots__ = ("objects", "payload_bytes", "reply", "spans")

    def __init__(
        self, reply: ReadReply, spans: list[Span], payload_bytes: int, objects: list[StoredObject]
    ) -> None:
        self.reply = reply
        self.spans = spans
        self.payload_bytes = payload_bytes
        self.objects = objects


class Reads:
    """Read, Await and Acquire answer None when they wait: their ticket then shows up in Waiters.finished and
    is answered by `finish`."""

    def __init__(
        self,
        catalog: Catalog,
        space: Space,
        waiters: Waiters,
        leases: Leases,
        counters: dict[str, float],
        default_lease_ms: int,
        max_lease_ms: int,
        max_payload_bytes: int,
        cold: ColdTier,
        promotions: Promotions,
        promotion_timeout_s: float,
        max_waiting_keys: int,
    ) -> None:
        self._catalog = catalog
        self._space = space
        self._waiters = waiters
        self._leases = leases
        self._counters = counters
        self._default_lease_ms = default_lease_ms
        self._max_lease_ms = max_lease_ms
        self._max_payload_bytes = max_payload_bytes
        self._cold = cold
        self._promotions = promotions
        self._promotion_timeout_s = promotion_timeout_s
        self._max_waiting_keys = max_waiting_keys
        self.load = 0.0
        """How busy the store is, 0 to 1; set by the shell, handed to readers with each Lookup."""

    # ---- looking ---------------------------------------------------------------------------------------

    def lookup(self, request: Lookup) -> LookupReply:
        """Counts as use: what was just found is about to be read and should not be evicted before."""
        get = self._catalog.by_key.get
        layers_ready: list[int] = []
        tiers = bytearray()
        for key in request.keys:
            obj = get(key)
            if obj is not None and obj.is_sealed:
                layers_ready.append(obj.layers_ready)
                tiers.append(Tier.DRAM)
            elif place := self._cold.find(key):
                layers_ready.append(place.num_layers)
                tiers.append(place.tier)
            elif obj is not None and request.include_pending:
                layers_ready.append(obj.layers_ready)
                tiers.append(Tier.DRAM)
            else:
                break
        num_hits = len(layers_ready)
        self._space.touch(request.keys[:num_hits])
        self._counters[metrics.LOOKUP_KEYS_TOTAL] += len(request.keys)
        self._counters[metrics.LOOKUP_HITS_TOTAL] += num_hits
        return LookupReply(request.id, num_hits, layers_ready, bytes(tiers), self.load)

    def exists(self, request: Exists) -> StatusReply:
        if self._catalog.has_all(request.keys):
            return StatusReply(request.id, bytes(len(request.keys)))
        get = self._catalog.by_key.get
        statuses = bytearray(len(request.keys))
        for index, key in enumerate(request.keys):
            obj = get(key)
            if (obj is not None and obj.layers_ready == obj.num_layers) or self._cold.find(key):
                continue
            statuses[index] = Status.MISSING if obj is None else Status.PENDING
        return StatusReply(request.id, bytes(statuses))

    # ---- reading, now or when it is there --------------------------------------------------------------

    def read(self, session: Session, request: Read, now: float) -> Served | None:
        ticket = self._wait_if_needed(session, request, now)
        if ticket is not None and ticket.open_keys:
            return None
        return self._serve(request, ticket)

    def await_layers(self, session: Session, request: Await, now: float) -> StatusReply | None:
        ticket = self._wait_if_needed(session, request, now)
        if ticket is not None and ticket.open_keys:
            return None
        return self._statuses(request, ticket)

    def acquire(self, session: Session, request: Acquire, now: float) -> AcquireReply | None:
        for lease in request.release:
            self._leases.release(session, lease)
        ticket = self._wait_if_needed(session, request, now)
        if ticket is not None and ticket.open_keys:
            return None
        return self._lease(session, request, ticket, now)

    def finish(self, ticket: Ticket, now: float) -> Served | StatusReply | AcquireReply:
        """The answer of a request that has waited."""
        request = ticket.request
        try:
            if isinstance(request, Read):
                return self._serve(request, ticket)
            if isinstance(request, Await):
                return self._statuses(request, ticket)
            return self._lease(ticket.session, request, ticket, now)
        finally:
            self._space.release(ticket.held)

    def renew(self, session: Session, request: Renew, now: float) -> Ack:
        if not self._leases.renew(session, request.lease, self._lease_end(request.lease_ms, now)):
            raise RequestRefused(ErrorCode.BAD_REQUEST, f"lease {request.lease} is over")
        return Ack(request.id)

    def release(self, session: Session, request: Release) -> Ack:
        """Ack also when the lease is over already: the reader wanted nothing else."""
        self._leases.release(session, request.lease)
        return Ack(request.id)

    # ---- inside ----------------------------------------------------------------------------------------

    def _find(
        self, key: bytes, layer_begin: int, layer_end: int, ticket: Ticket | None
    ) -> tuple[Status, StoredObject | None]:
        obj = self._catalog.by_key.get(key)
        if ticket is not None and key in ticket.outcomes:
            return ticket.outcomes[key], None
        if obj is not None:
            end = layer_end or obj.num_layers
            if not 0 <= layer_begin < end <= obj.num_layers:
                return Status.INVALID, None
            if obj.layers_ready >= end:
                return Status.OK, obj
        if ticket is not None and ticket.has_timed_out:
            return Status.TIMED_OUT, None
        return (Status.MISSING if obj is None else Status.PENDING), None

    def _wait_if_needed(self, session: Session, request: WaitingRequest, now: float) -> Ticket | None:
        """None: nothing to wait for. A ticket with open keys is parked; one without is answered at once."""
        if request.wait_ms <= 0 and not len(self._cold):
            return None
        layer_begin = request.layer_begin if not isinstance(request, Await) else 0
        awaited = [
            key
            for key in request.keys
            if self._find(key, layer_begin, request.layer_end, None)[0] in (Status.MISSING, Status.PENDING)
        ]
        if not awaited:
            return None
        ticket = Ticket(session, request)
        if request.wait_ms > 0:
            given_up = [key for key in awaited if self._waiters.was_given_up(key, now)]
            if given_up:
                ticket.outcomes = dict.fromkeys(given_up, Status.ABANDONED)
                awaited = [key for key in awaited if key not in ticket.outcomes]
                if not awaited:
                    return ticket
        if session.num_waiting_keys + len(awaited) > self._max_waiting_keys:
            raise RequestRefused(
                ErrorCode.OVER_LIMIT,
                f"{session.num_waiting_keys} keys of this connection are waited for already, allowed are "
                f"{self._max_waiting_keys}",
                retryable=True,
            )
        if len(awaited) < len(request.keys):
            self._space.touch(request.keys)  # what is there must not go to make room for what is not
        promoted = [key for key in awaited if self._promotions.want(key)]
        wait_s = request.wait_ms / 1e3
        if request.wait_ms <= 0:
            # A caller that does not wait for writers still gets what only has to come from disk.
            is_left = set(promoted)
            no_room = [key for key in awaited if key not in is_left and self._cold.find(key)]
            ticket.outcomes.update(dict.fromkeys(no_room, Status.FULL))
            awaited, wait_s = promoted, self._promotion_timeout_s
        if not awaited:
            return ticket if ticket.outcomes else None
        self._waiters.park(ticket, awaited, request.layer_end, now + wait_s)
        return ticket

    def _serve(self, request: Read, ticket: Ticket | None) -> Served:
        layer_begin = request.layer_begin
        statuses = bytearray(len(request.keys))
        sizes_bytes = [0] * len(request.keys)
        num_layers = [0] * len(request.keys) if request.layer_end == 0 else []
        objects: list[StoredObject] = []
        spans: list[Span] = []
        checksums: list[bytes] = []
        has_checksums = False
        payload_bytes = unsealed_layers = 0
        for index, key in enumerate(request.keys):
            status, obj = self._find(key, layer_begin, request.layer_end, ticket)
            if obj is None:
                statuses[index] = status
                continue
            layer_end = request.layer_end or obj.num_layers
            count = layer_end - layer_begin
            sizes_bytes[index] = size_bytes = obj.size_bytes // obj.num_layers * count
            payload_bytes += size_bytes
            if num_layers:
                num_layers[index] = count
            objects.append(obj)
            spans += layer_spans(obj, layer_begin, layer_end)
            if obj.checksums:
                has_checksums = True
                checksums.append(obj.checksums[8 * layer_begin : 8 * layer_end])
            else:
                checksums.append(bytes(8 * count))
            if not obj.is_sealed:
                unsealed_layers += count
        if payload_bytes > self._max_payload_bytes:
            raise RequestRefused(
                ErrorCode.OVER_LIMIT,
                f"the answer would have {payload_bytes} bytes, allowed are {self._max_payload_bytes}: "
                "ask for fewer keys at once",
            )
        for obj in objects:
            obj.users += 1
        if layer_begin == 0:
            self._space.touch(request.keys)
        self._counters[metrics.READ_BYTES_TOTAL] += payload_bytes
        self._counters[metrics.LAYERS_READ_BEFORE_SEAL_TOTAL] += unsealed_layers
        all_checksums = _unpack_checksums(checksums) if has_checksums else []
        reply = ReadReply(request.id, bytes(statuses), sizes_bytes, all_checksums, num_layers)
        return Served(reply, merge_neighbours(spans), payload_bytes, objects)

    def _statuses(self, request: Await, ticket: Ticket | None) -> StatusReply:
        statuses = bytes(self._find(key, 0, request.layer_end, ticket)[0] for key in request.keys)
        return StatusReply(request.id, statuses)

    def _lease(self, session: Session, request: Acquire, ticket: Ticket | None, now: float) -> AcquireReply:
        grants: list[Grant] = []
        objects: list[StoredObject] = []
        for key in request.keys:
            status, obj = self._find(key, request.layer_begin, request.layer_end, ticket)
            if obj is None:
                grants.append(Grant(status))
                continue
            objects.append(obj)
            extents = list(obj.extents) if session.has_direct_access else []
            missing = bytes(8 * (obj.num_layers - obj.layers_ready))
            checksums = _unpack_checksums([obj.checksums, missing]) if obj.checksums else []
            shape = (obj.size_bytes, obj.num_layers, obj.layers_ready)
            grants.append(Grant(status, extents, *shape, checksums, obj.unchecked))
            count = (request.layer_end or obj.num_layers) - request.layer_begin
            self._counters[metrics.READ_BYTES_TOTAL] += obj.size_bytes // obj.num_layers * count
            if not obj.is_sealed:
                self._counters[metrics.LAYERS_READ_BEFORE_SEAL_TOTAL] += count
        if request.layer_begin == 0:
            self._space.touch(request.keys)
        lease = 0
        if objects:
            lease = self._leases.grant(session, objects, self._lease_end(request.lease_ms, now))
        return AcquireReply(request.id, lease, grants)

    def _lease_end(self, lease_ms: int, now: float) -> float:
        wanted_ms = lease_ms if lease_ms > 0 else self._default_lease_ms
        return now + min(wanted_ms, self._max_lease_ms) / 1e3


def _unpack_checksums(packed: Sequence[bytes]) -> list[int]:
    joined = packed[0] if len(packed) == 1 else b"".join(packed)
    return list(struct.unpack(f"<{len(joined) // 8}Q", joined))
