"""How objects come to be: reserve, receive, commit layer by layer, seal; or be abandoned.

The first writer of a key wins. Until the last layer is committed the object belongs to its reservation, which
dies with its session or when no commit comes for `reservation_timeout_s`; nothing of it stays visible then.
"""

import struct
from collections import OrderedDict
from collections.abc import Sequence

from kvcore import metrics
from kvcore.errors import RequestRefused
from kvcore.wire.messages import (
    Abort,
    Commit,
    ErrorCode,
    Grant,
    Put,
    Reserve,
    ReserveReply,
    Status,
    StatusReply,
    Write,
)
from store_server.core.catalog import Catalog
from store_server.core.deadlines import NEVER, Agenda
from store_server.core.layers import Waiters
from store_server.core.objects import Reservation, Session, StoredObject
from store_server.core.space import Space
from store_server.core.tiering import ColdTier

MAX_KEY_BYTES = 255


class Incoming:
    """A Put or Write whose payload is on its way. `objects[i]` takes the bytes of keys[i] (None: skip
    them); each counts as used until `Writes.received` or `Writes.interrupted`. `checksums`: packed u64, those
    that follow the payload are filled in with it."""

    __slots__ = ("checksums", "objects", "request", "statuses")

    def __init__(self, request: Put | Write, checksums: bytes | bytearray) -> None:
        self.request = request
        self.checksums = checksums
        self.statuses = bytearray(len(request.keys))
        self.objects: list[StoredObject | None] = []


class Writes:
    def __init__(
        self,
        catalog: Catalog,
        space: Space,
        waiters: Waiters,
        agenda: Agenda,
        counters: dict[str, float],
        reservation_timeout_s: float,
        cold: ColdTier,
    ) -> None:
        self._catalog = catalog
        self._space = space
        self._waiters = waiters
        self._agenda = agenda
        self._counters = counters
        self._timeout_s = reservation_timeout_s
        self._cold = cold
        # In the order of their last progress: all have the same timeout, so the first is always due first.
        self._reservations: OrderedDict[bytes, Reservation] = OrderedDict()
        self.quarantined_bytes = 0
        self.is_draining = False
        """Set by the shell: no new objects, whatever room there is."""

    @property
    def num_pending(self) -> int:
        return len(self._reservations)

    # ---- requests --------------------------------------------------------------------------------------

    def reserve(
        self, session: Session, request: Reserve, now: float, *, may_wait: bool = False
    ) -> ReserveReply | None:
        """With `may_wait`, None and nothing done when there is no room yet but some is being made."""
        keys, sizes = request.keys, request.sizes_bytes
        if len(sizes) == 1:
            sizes = sizes * len(keys)
        if len(sizes) != len(keys):
            raise RequestRefused(
                ErrorCode.BAD_REQUEST, f"{len(sizes)} sizes for {len(keys)} keys (give one, or one a key)"
            )
        if request.parents and len(request.parents) != len(keys):
            raise RequestRefused(
                ErrorCode.BAD_REQUEST,
                f"{len(request.parents)} parents for {len(keys)} keys (give one a key, or none)",
            )
        reserved = self._reserve_all(
            session, keys, sizes, request.num_layers, now, session.has_direct_access, may_wait
        )
        if reserved is None:
            return None
        for (_, obj), parent in zip(reserved, request.parents, strict=False):
            if obj is not None:
                obj.parent = parent
        grants = []
        for (status, obj), size_bytes in zip(reserved, sizes, strict=True):
            if obj is None:
                grants.append(Grant(status))
            else:
                extents = list(obj.extents) if session.has_direct_access else []
                grants.append(Grant(status, extents, size_bytes, request.num_layers))
        return ReserveReply(request.id, grants)

    def put_begin(
        self, session: Session, request: Put, now: float, *, may_wait: bool = False
    ) -> Incoming | None:
        """Reserves what the payload of a Put will fill. With `may_wait`, None as `reserve` answers it."""
        keys, sizes = request.keys, request.sizes_bytes
        if len(sizes) != len(keys):
            raise RequestRefused(ErrorCode.BAD_REQUEST, f"{len(sizes)} sizes for {len(keys)} keys")
        checksums = _pack_checksums(request.checksums, len(keys))
        if checksums and request.sums_follow:
            raise RequestRefused(ErrorCode.BAD_REQUEST, "checksums are given, and follow as well")
        reserved = self._reserve_all(session, keys, sizes, 1, now, False, may_wait)
        if reserved is None:
            return None
        incoming = Incoming(request, bytearray(8 * len(keys)) if request.sums_follow else checksums)
        for index, (status, obj) in enumerate(reserved):
            incoming.statuses[index] = status
            incoming.objects.append(obj)
            if obj is not None:
                obj.users += 1
        return incoming

    def write_begin(self, session: Session, request: Write, payload_bytes: int) -> Incoming:
        """Finds what the payload of a Write will fill; each key has an equal share of it."""
        num_layers = request.layer_end - request.layer_begin
        share_bytes, remainder = divmod(payload_bytes, max(len(request.keys), 1))
        if num_layers < 1 or request.layer_begin < 0 or remainder:
            raise RequestRefused(
                ErrorCode.BAD_REQUEST,
                f"layers [{request.layer_begin}, {request.layer_end}) of {len(request.keys)} keys cannot "
                f"come as {payload_bytes} bytes in equal shares",
            )
        packed = _pack_checksums(request.checksums, len(request.keys) * num_layers)
        incoming = Incoming(request, packed)
        for index, key in enumerate(request.keys):
            status, obj = self._find_own(session, key, request.layer_begin, request.layer_end)
            if obj is not None and obj.size_bytes // obj.num_layers * num_layers != share_bytes:
                status, obj = Status.INVALID, None
            incoming.statuses[index] = status
            incoming.objects.append(obj)
            if obj is not None:
                obj.users += 1
        return incoming

    def received(
        self, session: Session, incoming: Incoming, corrupt: Sequence[int] | None, now: float
    ) -> StatusReply:
        """The payload is complete. `corrupt`: indices of keys whose bytes do not match their checksums; their
        objects are dropped. None: that is left to readers, who are told so."""
        request, statuses = incoming.request, incoming.statuses
        begin, end = (0, 1) if isinstance(request, Put) else (request.layer_begin, request.layer_end)
        for obj in incoming.objects if corrupt is None else ():
            if obj is not None:
                obj.unchecked = True
        for index in corrupt or ():
            statuses[index] = Status.CORRUPT
            self._counters[metrics.CORRUPT_TOTAL] += 1
            self._abandon_own(session, request.keys[index])
        self._commit(session, request.keys, begin, end, bytes(incoming.checksums), statuses, now)
        self._release(incoming)
        return StatusReply(request.id, bytes(statuses))

    def interrupted(self, session: Session, incoming: Incoming) -> None:
        """The connection broke before the payload was complete; the session is closed as well."""
        self._release(incoming)

    def commit(self, session: Session, request: Commit, now: float) -> StatusReply:
        num_layers = request.layer_end - request.layer_begin
        if num_layers < 1 or request.layer_begin < 0:
            raise RequestRefused(
                ErrorCode.BAD_REQUEST, f"no layers: [{request.layer_begin}, {request.layer_end})"
            )
        packed = _pack_checksums(request.checksums, len(request.keys) * num_layers)
        statuses = bytearray(len(request.keys))
        self._commit(session, request.keys, request.layer_begin, request.layer_end, packed, statuses, now)
        return StatusReply(request.id, bytes(statuses))

    def abort(self, session: Session, request: Abort, now: float) -> StatusReply:
        """OK, or INVALID for a key that somebody else is writing or that is sealed."""
        statuses = bytearray(len(request.keys))
        for index, key in enumerate(request.keys):
            if not self._abandon_own(session, key):
                if key in self._catalog.by_key:
                    statuses[index] = Status.INVALID
                    continue
                self._end_quarantine(session, key)
            self._waiters.give_up(key, now)
        return StatusReply(request.id, bytes(statuses))

    # ---- ends ------------------------------------------------------------------------------------------

    def abandon(self, key: bytes) -> None:
        """Takes a reservation from its writer. If it can still write to the extents they go to quarantine."""
        reservation = self._reservations[key]
        session, obj = reservation.session, reservation.obj
        if reservation.is_direct and session.has_direct_access:
            obj.users += 1
            session.quarantined.setdefault(key, []).append(obj)
            self.quarantined_bytes += obj.size_bytes
        self._abandon(reservation)

    def expire(self, now: float) -> None:
        while self._reservations:
            reservation = next(iter(self._reservations.values()))
            if reservation.deadline > now:
                break
            self.abandon(reservation.obj.key)

    def next_deadline(self) -> float:
        if not self._reservations:
            return NEVER
        return next(iter(self._reservations.values())).deadline

    def close_session(self, session: Session) -> None:
        """Extents of a session with direct access stay quarantined until `access_ended`."""
        own = [key for key, reservation in self._reservations.items() if reservation.session is session]
        for key in own:
            self.abandon(key)

    def access_ended(self, session: Session) -> None:
        """A mapping or a queue pair of the client is provably gone; with the last, so is the quarantine."""
        if session.has_direct_access:
            return
        for key in list(session.quarantined):
            self._end_quarantine(session, key)

    # ---- inside ----------------------------------------------------------------------------------------

    def _reserve_all(
        self,
        session: Session,
        keys: list[bytes],
        sizes_bytes: list[int],
        num_layers: int,
        now: float,
        is_direct: bool,
        may_wait: bool,
    ) -> list[tuple[Status, StoredObject | None]] | None:
        reserved: list[tuple[Status, StoredObject | None]] = []
        for key, size_bytes in zip(keys, sizes_bytes, strict=True):
            result = self._reserve(session, key, size_bytes, num_layers, now, is_direct)
            is_waiting_worth_it = self._space.is_making_room and not self.is_draining
            if result[0] is Status.FULL and may_wait and is_waiting_worth_it:
                for _, obj in reserved:
                    if obj is not None:
                        del self._reservations[obj.key]
                        self._space.discard(obj)
                return None
            reserved.append(result)
        self._counters[metrics.RESERVE_FULL_TOTAL] += sum(
            status in (Status.FULL, Status.TOO_LARGE) for status, _ in reserved
        )
        return reserved

    def _reserve(
        self, session: Session, key: bytes, size_bytes: int, num_layers: int, now: float, is_direct: bool
    ) -> tuple[Status, StoredObject | None]:
        existing = self._catalog.by_key.get(key)
        if (existing is not None and existing.is_sealed) or self._cold.find(key) is not None:
            return Status.EXISTS, None
        if existing is not None:
            return Status.PENDING, None
        if size_bytes < 1 or num_layers < 1 or size_bytes % num_layers or not 0 < len(key) <= MAX_KEY_BYTES:
            return Status.INVALID, None
        if self.is_draining:
            return Status.FULL, None
        obj = StoredObject(key, size_bytes, num_layers, ())
        status = self._space.allocate(obj)
        if status is not Status.OK:
            return status, None
        self._catalog.add(obj)
        deadline = now + self._timeout_s
        self._reservations[key] = Reservation(obj, session, deadline, is_direct)
        if len(self._reservations) == 1:
            self._agenda.expect(deadline)
        self._waiters.advance(key, 0, num_layers)
        return status, obj

    def _find_own(
        self, session: Session, key: bytes, layer_begin: int, layer_end: int
    ) -> tuple[Status, StoredObject | None]:
        """The object that this session may write these layers of, next."""
        reservation = self._reservations.get(key)
        if reservation is None or reservation.session is not session:
            # Its writer speaks again, so it has stopped writing to what it was granted.
            self._end_quarantine(session, key)
            return (Status.INVALID if key in self._catalog.by_key else Status.ABANDONED), None
        obj = reservation.obj
        if layer_begin != obj.layers_ready or layer_end > obj.num_layers:
            return Status.INVALID, None
        return Status.OK, obj

    def _commit(
        self,
        session: Session,
        keys: list[bytes],
        layer_begin: int,
        layer_end: int,
        checksums: bytes,
        statuses: bytearray,
        now: float,
    ) -> None:
        """Commits the keys whose status is OK so far, and sets the status of those that cannot be."""
        num_layers = layer_end - layer_begin
        sealed: list[StoredObject] = []
        num_committed = written_bytes = 0
        for index, key in enumerate(keys):
            if statuses[index]:
                continue
            status, obj = self._find_own(session, key, layer_begin, layer_end)
            if obj is None:
                statuses[index] = status
                continue
            if checksums and len(obj.checksums) == 8 * layer_begin:
                obj.checksums += checksums[8 * num_layers * index : 8 * num_layers * (index + 1)]
            else:
                obj.checksums = b""
            obj.layers_ready = layer_end
            num_committed += 1
            written_bytes += obj.size_bytes // obj.num_layers * num_layers
            if layer_end == obj.num_layers:
                del self._reservations[key]
                sealed.append(obj)
            else:
                self._reservations[key].deadline = now + self._timeout_s
                self._reservations.move_to_end(key)
            self._waiters.advance(key, layer_end, obj.num_layers)
        self._space.sealed(sealed)
        self._counters[metrics.WRITTEN_BYTES_TOTAL] += written_bytes
        self._counters[metrics.LAYERS_COMMITTED_TOTAL] += num_committed * num_layers
        self._counters[metrics.OBJECTS_SEALED_TOTAL] += len(sealed)

    def _abandon_own(self, session: Session, key: bytes) -> bool:
        """The writer itself gives up: it will not touch the extents again, no quarantine is needed."""
        reservation = self._reservations.get(key)
        if reservation is None or reservation.session is not session:
            return False
        self._abandon(reservation)
        return True

    def _abandon(self, reservation: Reservation) -> None:
        key = reservation.obj.key
        del self._reservations[key]
        self._space.discard(reservation.obj)
        self._counters[metrics.OBJECTS_ABANDONED_TOTAL] += 1
        self._waiters.resolve(key, Status.ABANDONED)

    def _end_quarantine(self, session: Session, key: bytes) -> None:
        for obj in session.quarantined.pop(key, ()):
            self.quarantined_bytes -= obj.size_bytes
            self._space.release((obj,))

    def _release(self, incoming: Incoming) -> None:
        self._space.release(obj for obj in incoming.objects if obj is not None)


def _pack_checksums(checksums: list[int], expected: int) -> bytes:
    if checksums and len(checksums) != expected:
        raise RequestRefused(
            ErrorCode.BAD_REQUEST, f"{len(checksums)} checksums where {expected} (or none) are expected"
        )
    try:
        return struct.pack(f"<{len(checksums)}Q", *checksums)
    except struct.error as error:
        raise RequestRefused(ErrorCode.BAD_REQUEST, f"a checksum is no 64-bit number: {error}") from error
