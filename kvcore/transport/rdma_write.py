"""Writes on the rdma plane: WRITE requests into what Reserve has granted, then Commit.

A Commit is sent by whichever thread sees the bytes arrive, not by the one that waits: readers follow a writer
that has gone on computing.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvcore.layout import layer_span, spans_within
from kvcore.transport.channel import Call
from kvcore.transport.checksums import checksum
from kvcore.transport.parts import (
    CommitPart,
    Reservation,
    WriteRun,
    grants_of,
    moved_bytes,
    statuses_of,
)
from kvcore.transport.rdma_mover import Move
from kvcore.transport.rdma_pieces import Plan
from kvcore.transport.verbs import Opcode
from kvcore.wire.messages import Abort, Commit, Reserve, Status, Write

if TYPE_CHECKING:
    from kvcore.transport.rdma import RdmaTransport


class RdmaWritePart:
    """One WriteRun. What RDMA cannot move, or has failed to, goes behind a Write of the control connection.
    Implements commit_order.Item."""

    def __init__(self, plane: "RdmaTransport", run: WriteRun, layer_begin: int, layer_end: int) -> None:
        self.indices: Sequence[int] = run.indices
        self.moved_bytes = 0
        self._plane = plane
        self._run = run
        self._layer_begin, self._layer_end = layer_begin, layer_end
        self._plan = Plan(plane.host)
        self._move: Move | None = None
        self._call: Call | None = None
        self._is_cancelled = False
        self._sending = threading.Lock()
        self._sent = threading.Lock()
        self._sent.acquire()

    def start(self) -> None:
        if self._plane.mover.num_live and self._add_all() and self._plan.take_room():
            self._plan.copy_in()
            self._move = self._plane.mover.start(
                Opcode.WRITE,
                self._plan.pieces(),
                (self._plan.keep(), self._run),
                on_end=self._plane.commits.pump,
            )
        self._plane.commits.add(self)

    def is_ready(self) -> bool:
        return self._move is None or self._move.ok is not None

    def send(self) -> None:
        with self._sending:
            self._plan.close()
            if not self._is_cancelled:
                self._call = self._start_call()
            self._sent.release()

    def _start_call(self) -> Call:
        plane, run = self._plane, self._run
        fields = (run.keys, self._layer_begin, self._layer_end, run.checksums)
        if self._move is not None and self._move.ok:
            return plane.channel.start(Commit, fields, stall_s=plane.timeout_s)
        plane.count_inline(len(run.keys))
        payload = [view for views in run.views for view in views]
        return plane.channel.start(Write, fields, payload=payload, stall_s=plane.timeout_s)

    def poll(self) -> bool:
        return self._call is not None and self._plane.channel.poll(self._call)

    def finish(self, deadline: float) -> list[Status]:
        if not self._sent.acquire(timeout=_left_s(deadline)):
            # Should it be sent at this very moment, its memory is the caller's again when that is over.
            with self._sending:
                self._is_cancelled = True
            if self._move is not None and self._move.ok is None:
                self._plane.mover.cancel(self._move)
            return [Status.TIMED_OUT] * len(self._run.keys)
        self._sent.release()
        if self._call is None:
            return [Status.TIMED_OUT] * len(self._run.keys)
        outcome = self._plane.channel.wait(self._call, deadline)
        commit = CommitPart(self._call, self._run, self._layer_end, self._plane.reservations)
        statuses = commit.finish(outcome, deadline)
        self.moved_bytes = commit.moved_bytes
        return statuses

    def _add_all(self) -> bool:
        """False: the store has not told where one of the objects lies."""
        for reservation, views in zip(self._run.reservations, self._run.views, strict=True):
            spans = self._spans(reservation)
            if spans is None:
                return False
            self._plan.add(spans, views)
        return True

    def _spans(self, reservation: Reservation) -> list[tuple[int, int]] | None:
        begin, end = layer_span(
            reservation.size_bytes, reservation.num_layers, self._layer_begin, self._layer_end
        )
        return spans_within(reservation.extents, begin, end, self._plane.pool_size_bytes)


class RdmaPutPart:
    """Whole objects: Reserve; then, by the thread that waits, WRITE requests and Commit."""

    def __init__(
        self,
        plane: "RdmaTransport",
        indices: Sequence[int],
        keys: list[bytes],
        values: Sequence[list[memoryview]],
        sizes_bytes: list[int],
    ) -> None:
        self.indices = indices
        self.moved_bytes = 0
        self._call = plane.channel.start(Reserve, (keys, sizes_bytes), stall_s=plane.timeout_s)
        self._plane = plane
        self._keys = keys
        self._values = values
        self._sizes_bytes = sizes_bytes

    def poll(self) -> bool:
        return self._plane.channel.poll(self._call)

    def finish(self, deadline: float) -> list[Status]:
        channel = self._plane.channel
        statuses, extents = grants_of(channel, self._keys, channel.wait(self._call, deadline))
        if extents:
            written = self._write(list(extents), list(extents.values()), deadline)
            for index, status in zip(extents, written, strict=True):
                statuses[index] = status
        self.moved_bytes = moved_bytes(statuses, self._sizes_bytes)
        return statuses

    def _write(self, granted: list[int], extents: list[list[int]], deadline: float) -> list[Status]:
        channel, timeout_s = self._plane.channel, self._plane.timeout_s
        keys = [self._keys[index] for index in granted]
        arrived = self._move(granted, extents, deadline)
        if arrived is None:
            channel.forget(Abort, (keys,))
            return [Status.TIMED_OUT] * len(keys)
        if arrived:
            sums = [checksum(self._values[index]) for index in granted] if self._plane.checksums else []
            call = channel.start(Commit, (keys, 0, 1, sums), stall_s=timeout_s)
            return statuses_of(channel.wait(call, deadline), len(keys))
        self._plane.count_inline(len(keys))
        statuses = []
        for index in granted:
            # One by one: the keys of a Write share its payload equally, and these differ in size.
            views = self._values[index]
            sums = [checksum(views)] if self._plane.checksums else []
            call = channel.start(Write, ([self._keys[index]], 0, 1, sums), payload=views, stall_s=timeout_s)
            statuses += statuses_of(channel.wait(call, deadline), 1)
        return statuses

    def _move(self, granted: list[int], extents: list[list[int]], deadline: float) -> bool | None:
        """Whether the bytes are there; None when the time was over first."""
        plan = Plan(self._plane.host)
        for index, run in zip(granted, extents, strict=True):
            spans = spans_within(run, 0, self._sizes_bytes[index], self._plane.pool_size_bytes)
            if spans is None:
                return False
            plan.add(spans, self._values[index])
        if not self._plane.mover.num_live or not plan.take_room():
            return False
        plan.copy_in()
        move = self._plane.mover.start(Opcode.WRITE, plan.pieces(), (plan.keep(), self._values))
        has_ended = move.wait(deadline)
        if not has_ended:
            self._plane.mover.cancel(move)
        plan.close()
        return move.ok if has_ended else None


class AfterWrites:
    """Something to say when all writes submitted before have ended. Implements commit_order.Item."""

    def __init__(self, say: Callable[[], None]) -> None:
        self._say = say

    def is_ready(self) -> bool:
        return True

    def send(self) -> None:
        self._say()


def _left_s(deadline: float) -> float:
    return min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)
