"""Reads on the rdma plane: Acquire, then READ requests of our own, under a lease that provably still
holds."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvcore.layout import granted_spans
from kvcore.transport.channel import Call, Outcome
from kvcore.transport.checksums import is_corrupt
from kvcore.transport.held_grants import Held
from kvcore.transport.parts import Sink, cut, failure_of, status_of
from kvcore.transport.rdma_mover import Move
from kvcore.transport.rdma_pieces import Plan
from kvcore.transport.tcp import ReadPart
from kvcore.transport.verbs import Opcode
from kvcore.wire.messages import AcquireReply, Grant, Release, Remove, Status

if TYPE_CHECKING:
    from kvcore.transport.rdma import RdmaTransport


class RdmaReadPart:
    """One Acquire. Its requests are posted by whoever waits or asks first when the answer is there. What RDMA
    cannot move, or has failed to, comes over the control connection within the same deadline."""

    def __init__(
        self, plane: "RdmaTransport", indices: Sequence[int], keys: list[bytes], sink: Sink, lease_ms: int
    ) -> None:
        self.indices = indices
        self.moved_bytes = 0
        self._plane = plane
        self._keys = keys
        self._sink = sink
        self._lease_ms = lease_ms
        self._held: Held | None = None
        self._call: Call | None = None
        self._plan = Plan(plane.host)
        self._move: Move | None = None
        self._begun = False
        self._statuses: list[Status] = []
        self._views: dict[int, Sequence[memoryview]] = {}  # by position in keys
        self._checksums: dict[int, Sequence[int]] = {}
        self._direct: list[int] = []
        self._inline: list[int] = []

    def send(self, layer_begin: int, layer_end: int, wait_ms: int) -> None:
        self._layer_begin, self._layer_end = layer_begin, layer_end
        self._held = self._plane.held.take(self._keys, layer_end)
        if self._held is None:
            self._call = self._acquire(wait_ms)
        else:
            self._begin_all(self._held)

    def poll(self) -> bool:
        if not self._begun and self._call is not None:
            if not self._plane.channel.poll(self._call):
                return False
            assert self._call.outcome is not None
            self._begin(self._call, self._call.outcome)
        return self._move is None or self._move.ok is not None

    def finish(self, deadline: float) -> list[Status]:
        channel = self._plane.channel
        # More than once when too little was left of the lease after a long wait.
        while not self._begun and self._call is not None:
            self._begin(self._call, channel.wait(self._call, deadline))
        try:
            self._end_move(deadline)
        finally:
            self._plan.close()
            if self._held is not None:
                self._plane.held.put_back(self._keys, self._held, self._layer_end, self.moved_bytes)
        if self._inline:
            self._read_inline(deadline)
        return self._statuses

    def _acquire(self, wait_ms: int) -> Call:
        plane, layers = self._plane, (self._layer_begin, self._layer_end)
        return plane.leases.acquire(self._keys, self._lease_ms, *layers, wait_ms, plane.timeout_s)

    def _begin(self, call: Call, outcome: Outcome) -> None:
        """Posts what has been granted. When the lease is over already it asks again, now without waiting."""
        if not isinstance(outcome, AcquireReply):
            self._begun = True
            self._statuses = [failure_of(outcome)] * len(self._keys)
            return
        held = Held(outcome.lease, outcome.grants, call.sent_at, self._lease_ms)
        if held.lease and held.is_over():
            self._plane.channel.forget(Release, (held.lease,))
            self._call = self._acquire(wait_ms=0)
            return
        self._held = held
        self._begin_all(held)

    def _begin_all(self, held: Held) -> None:
        self._begun = True
        if len(held.grants) != len(self._keys):
            self._statuses = [Status.INVALID] * len(self._keys)
            return
        self._statuses = [
            self._begin_one(position, index, grant)
            for position, (index, grant) in enumerate(zip(self.indices, held.grants, strict=True))
        ]
        if not self._direct:
            return
        if self._plane.mover.num_live and self._plan.take_room():
            self._move = self._plane.mover.start(Opcode.READ, self._plan.pieces(), self._plan.keep())
        else:
            self._inline += self._direct

    def _begin_one(self, position: int, index: int, grant: Grant) -> Status:
        if grant.status != Status.OK:
            return status_of(grant.status)
        layer_end = self._layer_end or grant.num_layers
        granted = granted_spans(
            grant.extents,
            grant.size_bytes,
            grant.num_layers,
            self._layer_begin,
            layer_end,
            self._plane.pool_size_bytes,
        )
        # Nobody makes room for a size that the store made up.
        if granted is None or granted[0] > self._plane.pool_size_bytes:
            return Status.INVALID
        num_bytes, spans = granted
        views = self._sink(index, num_bytes)
        if views is None:
            return Status.INVALID
        self._views[position] = views
        if spans is None:
            # The store gives extents only to who has a queue pair with it.
            self._inline.append(position)
        else:
            self._checksums[position] = grant.checksums[self._layer_begin : layer_end]
            self._direct.append(position)
            self._plan.add(spans, views)
        return Status.OK

    def _end_move(self, deadline: float) -> None:
        move = self._move
        if move is None:
            return
        if not move.wait(deadline):
            self._plane.mover.cancel(move)
            self._settle(Status.TIMED_OUT)
        elif not move.ok:
            self._inline += self._direct
        elif not self._plane.channel.still_open():
            self._settle(Status.UNAVAILABLE)
        elif self._held is None or self._held.is_over():
            # What was read after the lease ended may be anything.
            self._settle(Status.TIMED_OUT)
        else:
            self._plan.copy_out()
            self._verify()

    def _settle(self, status: Status) -> None:
        for position in self._direct:
            self._statuses[position] = status

    def _verify(self) -> None:
        corrupt = []
        for position in self._direct:
            views, expected = self._views[position], self._checksums[position]
            if self._plane.verify and expected and is_corrupt(views, expected):
                self._statuses[position] = Status.CORRUPT
                corrupt.append(self._keys[position])
            else:
                self.moved_bytes += sum(map(len, views))
        if corrupt:
            # Left there it could neither be read nor be written again.
            self._plane.channel.forget(Remove, (corrupt,))

    def _read_inline(self, deadline: float) -> None:
        channel = self._plane.channel
        positions = sorted(self._inline)
        sizes_bytes = [sum(map(len, self._views[position])) for position in positions]

        def sink(position: int, size_bytes: int) -> Sequence[memoryview] | None:
            views = self._views[position]
            return views if sum(map(len, views)) == size_bytes else None

        for run in cut(sizes_bytes, channel.max_payload_bytes, channel.max_keys):
            taken = positions[run.start : run.stop]
            keys = [self._keys[position] for position in taken]
            part = ReadPart(channel, taken, keys, sink, verify=self._plane.verify)
            part.send(self._layer_begin, self._layer_end, 0, self._plane.timeout_s)
            found = part.finish(channel.wait(part.call, deadline), deadline)
            for position, status in zip(taken, found, strict=True):
                self._statuses[position] = status
            self.moved_bytes += part.moved_bytes
        self._plane.count_inline(len(positions))
