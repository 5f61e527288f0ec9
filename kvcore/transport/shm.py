"""The shm plane, for clients on the store's own host: bytes are copied through the mapped pool.

Reads: Acquire -> copy; the lease ends with the next Acquire, or by Release where it would hold up much.
Writes: (Reserve has granted the extents) copy -> Commit. Batches that are small in all go inline through the
tcp plane, where that is cheaper.
"""

import time
from collections.abc import Sequence

from kvcore.layout import granted_spans, layer_span, spans_within, total_bytes
from kvcore.transport.base import WriteBatch
from kvcore.transport.channel import Call, Channel, Outcome
from kvcore.transport.checksums import RunningSums, is_corrupt
from kvcore.transport.ended_leases import EndedLeases
from kvcore.transport.host_plane import HostPlane
from kvcore.transport.lease_time import safe_end_s
from kvcore.transport.mapping import PoolMapping, copy_from_pool, copy_to_pool
from kvcore.transport.parts import (
    CommitPart,
    Observer,
    Part,
    PartsTransfer,
    Reservation,
    Sink,
    WriteRun,
    cut,
    failure_of,
    grants_of,
    moved_bytes,
    plan_write,
    status_of,
    statuses_of,
)
from kvcore.transport.pool_view import ObjectView, open_view
from kvcore.transport.tcp import TcpTransport
from kvcore.wire.messages import (
    Abort,
    AcquireReply,
    Commit,
    Grant,
    Release,
    Remove,
    Reserve,
    Status,
)

# Up to here bytes in the message beat mapped memory: measured, reads cross at about 50 KiB (one round trip
# either way), puts, which need two, at about 240 KiB.
INLINE_READ_BYTES = 48 << 10
INLINE_PUT_BYTES = 240 << 10
UNLIMITED_BYTES = 1 << 62


class AcquirePart:
    """One Acquire. The copy is made by the thread that waits, under a lease that provably still holds."""

    def __init__(
        self,
        plane: "ShmTransport",
        indices: Sequence[int],
        keys: list[bytes],
        sink: Sink,
        lease_ms: int,
    ) -> None:
        self.indices = indices
        self.call: Call  # from `send` on
        self.moved_bytes = 0
        self._lease_ms = lease_ms
        self._plane = plane
        self._keys = keys
        self._sink = sink
        self._corrupt: list[bytes] = []

    def send(self, layer_begin: int, layer_end: int, wait_ms: int) -> None:
        self._layer_begin, self._layer_end = layer_begin, layer_end
        self.call = self._acquire(wait_ms)

    def finish(self, outcome: Outcome, deadline: float) -> list[Status]:
        channel = self._plane.channel
        # When too little is left of the lease a new one is asked for, now without waiting.
        while isinstance(outcome, AcquireReply) and time.monotonic() > self._lease_ends() and outcome.lease:
            channel.forget(Release, (outcome.lease,))
            self.call = self._acquire(wait_ms=0)
            outcome = channel.wait(self.call, deadline)
        if not isinstance(outcome, AcquireReply):
            return [failure_of(outcome)] * len(self._keys)
        try:
            return self._copy(outcome)
        finally:
            if outcome.lease:
                self._plane.leases.end(outcome.lease, self.moved_bytes)
            if self._corrupt:
                # Left there it could neither be read nor be written again. By force: the pool's own bytes are
                # wrong, and leases of its other layers, ours too, may go on for a while.
                channel.forget(Remove, (self._corrupt, True))

    def _acquire(self, wait_ms: int) -> Call:
        plane, layers = self._plane, (self._layer_begin, self._layer_end)
        return plane.leases.acquire(self._keys, self._lease_ms, *layers, wait_ms, plane.timeout_s)

    def _lease_ends(self) -> float:
        return safe_end_s(self.call.sent_at, self._lease_ms)

    def _copy(self, reply: AcquireReply) -> list[Status]:
        if len(reply.grants) != len(self._keys):
            return [Status.INVALID] * len(self._keys)
        with self._plane.mapping.using() as pool:
            if pool is None:
                return [Status.UNAVAILABLE] * len(self._keys)
            statuses = [
                self._copy_one(pool, index, key, grant)
                for index, key, grant in zip(self.indices, self._keys, reply.grants, strict=True)
            ]
        # What was copied after the lease ended, by time or because the store dropped us, may be anything.
        if not self._plane.channel.still_open():
            return [Status.UNAVAILABLE if status is Status.OK else status for status in statuses]
        if time.monotonic() > self._lease_ends():
            return [Status.TIMED_OUT if status is Status.OK else status for status in statuses]
        return statuses

    def _copy_one(self, pool: memoryview, index: int, key: bytes, grant: Grant) -> Status:
        if grant.status != Status.OK:
            return status_of(grant.status)
        layer_end = self._layer_end or grant.num_layers
        granted = granted_spans(
            grant.extents, grant.size_bytes, grant.num_layers, self._layer_begin, layer_end, len(pool)
        )
        # Only what lies in the pool: nobody makes room for a size that the store made up.
        num_bytes, spans = granted or (0, None)
        views = self._sink(index, num_bytes) if spans is not None else None
        if spans is None or views is None:
            return Status.INVALID
        copy_from_pool(pool, spans, views)
        expected = grant.checksums[self._layer_begin : layer_end]
        if self._plane.finds_corrupt(grant, views, expected):
            self._corrupt.append(key)
            return Status.CORRUPT
        self.moved_bytes += num_bytes
        return Status.OK


class PutPart:
    """Reserve, then, by the thread that waits, copy and Commit."""

    def __init__(
        self,
        plane: "ShmTransport",
        indices: Sequence[int],
        keys: list[bytes],
        values: Sequence[list[memoryview]],
        sizes_bytes: list[int],
    ) -> None:
        self.indices = indices
        self.moved_bytes = 0
        self.call = plane.channel.start(Reserve, (keys, sizes_bytes), stall_s=plane.timeout_s)
        self._plane = plane
        self._keys = keys
        self._values = values
        self._sizes_bytes = sizes_bytes

    def finish(self, outcome: Outcome, deadline: float) -> list[Status]:
        channel = self._plane.channel
        statuses, extents = grants_of(channel, self._keys, outcome)
        sums = RunningSums([self._values[index] for index in extents]) if self._plane.checksums else None
        with self._plane.mapping.using() as pool:
            for index in extents:
                size_bytes = self._sizes_bytes[index]
                spans = pool and spans_within(extents[index], 0, size_bytes, len(pool))
                if not pool or not spans:
                    channel.forget(Abort, ([self._keys[index] for index in extents],))
                    return [Status.UNAVAILABLE] * len(self._keys)
                copy_to_pool(pool, spans, self._values[index], sums)
        if extents:
            keys = [self._keys[index] for index in extents]
            fields = (keys, 0, 1, sums.sums if sums is not None else [])
            call = channel.start(Commit, fields, stall_s=self._plane.timeout_s)
            committed = statuses_of(channel.wait(call, deadline), len(extents))
            for index, status in zip(extents, committed, strict=True):
                statuses[index] = status
        self.moved_bytes = moved_bytes(statuses, self._sizes_bytes)
        return statuses


class ShmTransport(HostPlane):
    """Implements Transport. Reads and puts of up to so many bytes in all go through `inline`."""

    name = "shm"

    def __init__(
        self,
        inline: TcpTransport,
        mapping: PoolMapping,
        *,
        lease_ms: int,
        verify: bool = False,
        inline_read_bytes: int = INLINE_READ_BYTES,
        inline_put_bytes: int = INLINE_PUT_BYTES,
    ) -> None:
        self.channel: Channel = inline.channel
        self.mapping = mapping
        self.lease_ms = lease_ms
        self.timeout_s = inline.timeout_s
        self._verify = verify
        self.inline_read_bytes = inline_read_bytes
        self.inline_put_bytes = inline_put_bytes
        self._inline = inline
        self.checksums = inline.checksums
        self._reservations: dict[bytes, Reservation] = inline.reservations
        self.leases = EndedLeases(self.channel, lease_ms)

    def submit_read(
        self,
        keys: list[bytes],
        sizes_bytes: Sequence[int],
        sink: Sink,
        layer_begin: int = 0,
        layer_end: int = 0,
        wait_ms: int = 0,
    ) -> PartsTransfer:
        if sum(sizes_bytes) <= self.inline_read_bytes:
            return self._inline.submit_read(keys, sizes_bytes, sink, layer_begin, layer_end, wait_ms)
        parts: list[Part] = []
        for run in cut(sizes_bytes, UNLIMITED_BYTES, self.channel.max_keys):
            lease_ms = self.leases.duration_ms(sum(sizes_bytes[run.start : run.stop]))
            part = AcquirePart(self, run, keys[run.start : run.stop], sink, lease_ms)
            part.send(layer_begin, layer_end, wait_ms)
            parts.append(part)
        return PartsTransfer(
            self.channel,
            parts,
            [Status.INVALID] * len(keys),
            self.timeout_s + wait_ms / 1e3,
            self._inline.on_read,
        )

    def read_one(self, key: bytes, size_bytes: int, sink: Sink) -> Status:
        if size_bytes <= self.inline_read_bytes:
            return self._inline.read_one(key, size_bytes, sink)
        return self.submit_read([key], [size_bytes], sink).wait()[0]

    def view_one(self, key: bytes) -> ObjectView | None:
        """A whole object in the pool, under a lease of its own."""
        found = open_view(self, key)
        if isinstance(found, Status):
            self._inline.on_read((found,), 0)
            return None
        self._inline.on_read((Status.OK,), found.size_bytes)
        return found

    def finds_corrupt(self, grant: Grant, views: Sequence[memoryview], expected: Sequence[int]) -> bool:
        """Looks at what came over a network, and at what this host wrote only if that is wanted. `expected`:
        one sum a layer, or none."""
        return (self._verify or grant.unchecked) and is_corrupt(views, expected)

    def submit_put(self, keys: list[bytes], values: Sequence[list[memoryview]]) -> PartsTransfer:
        sizes_bytes = [total_bytes(views) for views in values]
        if sum(sizes_bytes) <= self.inline_put_bytes:
            return self._inline.submit_put(keys, values)
        parts: list[Part] = [
            PutPart(
                self,
                run,
                keys[run.start : run.stop],
                values[run.start : run.stop],
                sizes_bytes[run.start : run.stop],
            )
            for run in cut(sizes_bytes, UNLIMITED_BYTES, self.channel.max_keys)
        ]
        return self._transfer(parts, len(keys), self._inline.on_write)

    def settle(self) -> None:
        self.leases.settle()

    def close(self) -> None:
        self._inline.close()
        self.mapping.close()

    def let_go(self) -> None:
        self.mapping.close()

    def leave_to_parent(self) -> None:
        self.mapping.abandon_after_fork()

    def submit_write(self, batch: WriteBatch) -> PartsTransfer:
        runs, statuses = plan_write(
            batch, self._reservations, self.channel, with_checksums=self._inline.checksums
        )
        parts: list[Part] = []
        for run in runs:
            if not self._copy_run(run, batch.layer_begin, batch.layer_end):
                for index in run.indices:
                    statuses[index] = Status.UNAVAILABLE
                continue
            call = self.channel.start(
                Commit,
                (run.keys, batch.layer_begin, batch.layer_end, run.checksums),
                stall_s=self.timeout_s,
            )
            parts.append(CommitPart(call, run, batch.layer_end, self._reservations))
        return self._transfer(parts, len(batch.keys), self._inline.on_write, statuses)

    def _copy_run(self, run: WriteRun, layer_begin: int, layer_end: int) -> bool:
        with self.mapping.using() as pool:
            for reservation, views in zip(run.reservations, run.views, strict=True):
                begin, end = layer_span(
                    reservation.size_bytes, reservation.num_layers, layer_begin, layer_end
                )
                spans = pool and spans_within(reservation.extents, begin, end, len(pool))
                if not pool or not spans:
                    return False
                copy_to_pool(pool, spans, views)
        return True

    def _transfer(
        self, parts: Sequence[Part], num_keys: int, observe: Observer, statuses: list[Status] | None = None
    ) -> PartsTransfer:
        if statuses is None:
            statuses = [Status.INVALID] * num_keys
        return PartsTransfer(self.channel, parts, statuses, self.timeout_s, observe)
