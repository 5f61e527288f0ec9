"""The tcp plane: payload streams behind Read and Write frames, straight from and into the caller's memory.

It needs nothing but the control connection (which may be a Unix socket), so every client has it.
"""

import time
from collections.abc import Sequence

from kvcore.errors import RemoteProtocolError
from kvcore.layout import total_bytes
from kvcore.transport.base import WriteBatch
from kvcore.transport.channel import Call, Channel, Outcome
from kvcore.transport.checksums import (
    LARGE_READ_BYTES,
    LATE_SUMS_BYTES,
    LateSums,
    RunningSums,
    checksum,
    differs,
    is_corrupt,
    split_layers,
)
from kvcore.transport.host_plane import HostPlane
from kvcore.transport.one_read import OneRead
from kvcore.transport.parts import (
    OK_CODE,
    CommitPart,
    Observer,
    Part,
    PartsTransfer,
    Reservation,
    Sink,
    StatusPart,
    cut,
    drop,
    failure_of,
    plan_write,
    status_of,
)
from kvcore.wire.messages import Put, Read, ReadReply, Remove, Status, Write


class ReadPart:
    """One Read. Its payload is placed by whichever thread receives it, and judged by the one that waits."""

    def __init__(
        self, channel: Channel, indices: Sequence[int], keys: list[bytes], sink: Sink, *, verify: bool
    ) -> None:
        self.indices = indices
        self.call: Call  # from `send` on
        self.moved_bytes = 0
        self._channel = channel
        self._keys = keys
        self._sink = sink
        self._verify = verify
        self._placed: list[Sequence[memoryview] | None] = []
        self._running: RunningSums | None = None

    def send(self, layer_begin: int, layer_end: int, wait_ms: int, stall_s: float) -> None:
        self._num_layers = layer_end - layer_begin
        self.call = self._channel.start(
            Read,
            (self._keys, layer_begin, layer_end, wait_ms),
            place=self.place,
            moved=self.moved,
            stall_s=stall_s,
            wait_s=wait_ms / 1e3,
        )

    def place(self, reply: ReadReply, payload_bytes: int) -> list[memoryview]:
        sizes_bytes = reply.sizes_bytes
        if (
            not len(reply.statuses) == len(sizes_bytes) == len(self._keys)
            or len(reply.num_layers) not in (0, len(self._keys))
            or sum(sizes_bytes) != payload_bytes
        ):
            raise RemoteProtocolError(f"a ReadReply that does not fit its request of {len(self._keys)} keys")
        if reply.checksums and len(reply.checksums) != self._num_sums(reply):
            raise RemoteProtocolError(f"a ReadReply with {len(reply.checksums)} checksums for other layers")
        targets: list[memoryview] = []
        sink, placed = self._sink, self._placed
        for index, code, size_bytes in zip(self.indices, reply.statuses, sizes_bytes, strict=True):
            views = sink(index, size_bytes) if code == OK_CODE else None
            placed.append(views)
            targets += views if views is not None else drop(size_bytes)
        if self._verify and reply.checksums and payload_bytes > LARGE_READ_BYTES:
            self._running = RunningSums(self._layers(reply))
        return targets

    def moved(self, size_bytes: int) -> None:
        if self._running is not None:
            self._running.add(size_bytes)

    def finish(self, outcome: Outcome, deadline: float) -> list[Status]:
        if not isinstance(outcome, ReadReply):
            return [failure_of(outcome)] * len(self._keys)
        statuses = [status_of(code) for code in outcome.statuses]
        corrupt: list[bytes] = []
        position = 0
        ok = Status.OK
        for index, views in enumerate(self._placed):
            if statuses[index] is not ok:
                continue
            count = self._count_of(outcome, index)
            expected = outcome.checksums[position : position + count]
            position += count
            if views is None:
                statuses[index] = Status.INVALID
            elif self._verify and expected and self._is_corrupt(views, expected, position):
                statuses[index] = Status.CORRUPT
                corrupt.append(self._keys[index])
            else:
                self.moved_bytes += outcome.sizes_bytes[index]
        if corrupt:
            # Left there it could neither be read nor be written again.
            self._channel.forget(Remove, (corrupt,))
        return statuses

    def _num_sums(self, reply: ReadReply) -> int:
        """How many checksums belong to its payload; -1 when it says that there are layers without any."""
        statuses, counts = reply.statuses, reply.num_layers
        if not counts:
            return self._num_layers * statuses.count(OK_CODE) if self._num_layers else -1
        of_found = [count for count, code in zip(counts, statuses, strict=True) if code == OK_CODE]
        return sum(of_found) if min(of_found, default=1) > 0 else -1

    def _count_of(self, reply: ReadReply, index: int) -> int:
        return reply.num_layers[index] if reply.num_layers else self._num_layers

    def _layers(self, reply: ReadReply) -> list[Sequence[memoryview]]:
        """All that come as payload, also those that nobody wants."""
        layers: list[Sequence[memoryview]] = []
        for index, (views, code) in enumerate(zip(self._placed, reply.statuses, strict=True)):
            if code == OK_CODE:
                whole = views if views is not None else drop(reply.sizes_bytes[index])
                layers += split_layers(whole, self._count_of(reply, index))
        return layers

    def _is_corrupt(self, views: Sequence[memoryview], expected: Sequence[int], end: int) -> bool:
        if self._running is None:
            return is_corrupt(views, expected)
        return differs(expected, self._running.sums[end - len(expected) : end])


class TcpTransport(HostPlane):
    """Implements Transport. `verify`: compare what is read with its writer's checksums."""

    name = "tcp"

    def __init__(
        self,
        channel: Channel,
        reservations: dict[bytes, Reservation],
        *,
        timeout_s: float,
        checksums: bool = True,
        verify: bool = True,
        on_read: Observer,
        on_write: Observer,
    ) -> None:
        self.channel = channel
        self.reservations = reservations
        self.timeout_s = timeout_s
        self.checksums = checksums
        self._verify = verify
        self.on_read = on_read
        self.on_write = on_write

    def submit_read(
        self,
        keys: list[bytes],
        sizes_bytes: Sequence[int],
        sink: Sink,
        layer_begin: int = 0,
        layer_end: int = 0,
        wait_ms: int = 0,
    ) -> PartsTransfer:
        parts: list[Part] = []
        for run in cut(sizes_bytes, self.channel.max_payload_bytes, self.channel.max_keys):
            part = ReadPart(self.channel, run, keys[run.start : run.stop], sink, verify=self._verify)
            part.send(layer_begin, layer_end, wait_ms, self.timeout_s)
            parts.append(part)
        return PartsTransfer(
            self.channel,
            parts,
            [Status.INVALID] * len(keys),
            self.timeout_s + wait_ms / 1e3,
            self.on_read,
        )

    def read_one(self, key: bytes, size_bytes: int, sink: Sink) -> Status:
        read = OneRead(key, sink, self._verify)
        status = read.run(self.channel, time.monotonic() + self.timeout_s)
        self.on_read((status,), read.moved_bytes)
        return status

    def submit_put(self, keys: list[bytes], values: Sequence[list[memoryview]]) -> PartsTransfer:
        """In one round trip."""
        sizes_bytes = [total_bytes(views) for views in values]
        max_payload_bytes = self.channel.max_payload_bytes
        statuses = [Status.TOO_LARGE] * len(keys)
        parts: list[Part] = []
        for run in cut(sizes_bytes, max_payload_bytes, self.channel.max_keys):
            if sizes_bytes[run.start] > max_payload_bytes:
                continue
            part_values, part_sizes = values[run.start : run.stop], sizes_bytes[run.start : run.stop]
            follow = self.checksums and sum(part_sizes) > LATE_SUMS_BYTES
            sums = [checksum(views) for views in part_values] if self.checksums and not follow else []
            call = self.channel.start(
                Put,
                (keys[run.start : run.stop], part_sizes, sums, follow),
                payload=[view for views in part_values for view in views],
                sums=LateSums(part_values) if follow else None,
                stall_s=self.timeout_s,
            )
            parts.append(StatusPart(call, run, part_sizes))
        return PartsTransfer(
            self.channel,
            parts,
            statuses,
            self.timeout_s,
            self.on_write,
        )

    def close(self) -> None:
        self.channel.close()

    def submit_write(self, batch: WriteBatch) -> PartsTransfer:
        runs, statuses = plan_write(batch, self.reservations, self.channel, with_checksums=self.checksums)
        parts: list[Part] = []
        for run in runs:
            call = self.channel.start(
                Write,
                (run.keys, batch.layer_begin, batch.layer_end, run.checksums),
                payload=[view for views in run.views for view in views],
                stall_s=self.timeout_s,
            )
            parts.append(CommitPart(call, run, batch.layer_end, self.reservations))
        return PartsTransfer(
            self.channel,
            parts,
            statuses,
            self.timeout_s,
            self.on_write,
        )
