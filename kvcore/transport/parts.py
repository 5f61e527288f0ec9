"""What tcp and shm have in common: batches cut into requests, answers turned into one Status a key."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from kvcore.layout import as_views, total_bytes
from kvcore.transport.base import Buffer, ReadBatch, WriteBatch
from kvcore.transport.channel import Call, Channel, Outcome
from kvcore.transport.checksums import layer_checksums
from kvcore.wire.messages import Abort, ErrorReply, Grant, ReserveReply, Status, StatusReply

# Says where the `size_bytes` bytes of the index-th key go; None: nowhere, the size does not fit.
Sink = Callable[[int, int], Sequence[memoryview] | None]
# Told once about each finished batch: the statuses and how many bytes were moved.
Observer = Callable[[Sequence[Status], int], None]

# Members of an enum are slow to look up in Python 3.11; per-key loops take theirs beforehand.
OK_CODE = int(Status.OK)
_BY_CODE = [Status(code) if code in Status._value2member_map_ else Status.INVALID for code in range(256)]

# Bytes nobody wants are received into the same memory over and over.
_scratch = memoryview(bytearray(256 << 10))


class Reservation:
    """An object this client is the writer of. `next_layer` is the first one not yet handed to a plane."""

    __slots__ = ("extents", "next_layer", "num_layers", "size_bytes")

    def __init__(self, grant: Grant, size_bytes: int, num_layers: int) -> None:
        self.size_bytes = size_bytes
        self.num_layers = num_layers
        self.extents = grant.extents
        self.next_layer = 0


class Part(Protocol):
    """One request of a batch. `indices` are those of its keys in the batch, `moved_bytes` what it moved."""

    call: Call
    indices: Sequence[int]
    moved_bytes: int

    def finish(self, outcome: Outcome, deadline: float) -> list[Status]: ...


class PartsTransfer:
    """Implements Transfer over the requests of one batch."""

    def __init__(
        self,
        channel: Channel,
        parts: Sequence[Part],
        statuses: list[Status],
        timeout_s: float,
        observe: Observer,
    ) -> None:
        self._channel = channel
        self._parts = parts
        self._statuses = statuses
        self._timeout_s = timeout_s
        self._observe = observe
        self._finished = False

    def done(self) -> bool:
        return self._finished or all(self._channel.poll(part.call) for part in self._parts)

    def wait(self, timeout_ms: float | None = None) -> list[Status]:
        if not self._finished:
            timeout_s = self._timeout_s if timeout_ms is None else timeout_ms / 1e3
            deadline = time.monotonic() + timeout_s
            size_bytes = 0
            for part in self._parts:
                outcome = self._channel.wait(part.call, deadline)
                found = part.finish(outcome, deadline)
                size_bytes += part.moved_bytes
                for index, status in zip(part.indices, found, strict=True):
                    self._statuses[index] = status
            self._finished = True
            self._observe(self._statuses, size_bytes)
        return list(self._statuses)


def grants_of(
    channel: Channel, keys: list[bytes], outcome: Outcome
) -> tuple[list[Status], dict[int, list[int]]]:
    """What became of a Reserve: one status a key, and by position the extents of those that may be written.
    One that nobody waits for any more is taken back."""
    if not isinstance(outcome, ReserveReply) or len(outcome.grants) != len(keys):
        if outcome is Status.TIMED_OUT:
            channel.forget(Abort, (keys,))
        return [failure_of(outcome)] * len(keys), {}
    statuses = [status_of(grant.status) for grant in outcome.grants]
    extents = {
        index: outcome.grants[index].extents for index, status in enumerate(statuses) if status is Status.OK
    }
    return statuses, extents


class FinishedTransfer:
    """A transfer that was over before it began."""

    def __init__(self, statuses: list[Status]) -> None:
        self._statuses = statuses

    def done(self) -> bool:
        return True

    def wait(self, timeout_ms: float | None = None) -> list[Status]:
        return list(self._statuses)


class StatusPart:
    """A request that is answered by statuses alone."""

    def __init__(self, call: Call, indices: Sequence[int], sizes_bytes: Sequence[int]) -> None:
        self.call = call
        self.indices = indices
        self.moved_bytes = 0
        self._sizes_bytes = sizes_bytes

    def finish(self, outcome: Outcome, deadline: float) -> list[Status]:
        statuses = statuses_of(outcome, len(self.indices))
        self.moved_bytes = moved_bytes(statuses, self._sizes_bytes)
        return statuses


class UnpinnedRegion:
    """What registering means to planes that go through the kernel: nothing."""

    def __init__(self, buffer: Buffer) -> None:
        self.size_bytes = memoryview(buffer).nbytes

    def close(self) -> None:
        pass


def statuses_of(outcome: Outcome, num_keys: int) -> list[Status]:
    """One Status a key from a StatusReply, or the same one for all from anything else."""
    if isinstance(outcome, StatusReply) and len(outcome.statuses) == num_keys:
        return [_BY_CODE[code] for code in outcome.statuses]
    return [failure_of(outcome)] * num_keys


def are_found(codes: bytes) -> list[bool]:
    """Which of the keys of an Exists are there."""
    if codes.count(OK_CODE) == len(codes):
        return [True] * len(codes)
    return [code == OK_CODE for code in codes]


def moved_bytes(statuses: Sequence[Status], sizes_bytes: Sequence[int]) -> int:
    ok = Status.OK
    return sum(size for status, size in zip(statuses, sizes_bytes, strict=True) if status is ok)


def status_of(code: int) -> Status:
    return _BY_CODE[code] if 0 <= code < 256 else Status.INVALID


def failure_of(outcome: Outcome) -> Status:
    """The Status that stands for an outcome other than the expected answer."""
    if isinstance(outcome, Status):
        return outcome
    if isinstance(outcome, ErrorReply):
        return Status.UNAVAILABLE if outcome.retryable else Status.INVALID
    return Status.INVALID


def writable_views(buffer: Any) -> list[memoryview]:
    views = as_views(buffer)
    for view in views:
        if view.readonly:
            raise TypeError("a read needs writable memory, and this buffer is read-only")
    return views


def exact_sink(batch: ReadBatch) -> tuple[Sink, list[int]]:
    """The sink of a ReadBatch, and how many bytes each key is expected to have."""
    places = [writable_views(buffer) for buffer in batch.buffers]
    sizes_bytes = [total_bytes(views) for views in places]

    def sink(index: int, size_bytes: int) -> Sequence[memoryview] | None:
        return places[index] if sizes_bytes[index] == size_bytes else None

    return sink, sizes_bytes


def drop(size_bytes: int) -> list[memoryview]:
    whole, rest = divmod(size_bytes, len(_scratch))
    return [_scratch] * whole + ([_scratch[:rest]] if rest else [])


def cut(sizes_bytes: Sequence[int], max_bytes: int, max_keys: int) -> Iterator[range]:
    """Runs of keys whose sizes add up to at most `max_bytes`. A key that is larger alone gets its own."""
    if sum(sizes_bytes) <= max_bytes and 0 < len(sizes_bytes) <= max_keys:
        yield range(len(sizes_bytes))
        return
    first, run_bytes = 0, 0
    for index, size_bytes in enumerate(sizes_bytes):
        if index > first and (run_bytes + size_bytes > max_bytes or index - first == max_keys):
            yield range(first, index)
            first, run_bytes = index, 0
        run_bytes += size_bytes
    if first < len(sizes_bytes):
        yield range(first, len(sizes_bytes))


class WriteRun:
    """Keys of a WriteBatch that go out as one message: each with the same number of bytes."""

    def __init__(self, share_bytes: int) -> None:
        self.share_bytes = share_bytes
        self.indices: list[int] = []
        self.keys: list[bytes] = []
        self.reservations: list[Reservation] = []
        self.views: list[list[memoryview]] = []
        self.checksums: list[int] = []


def plan_write(
    batch: WriteBatch,
    reservations: dict[bytes, Reservation],
    limits: Channel,
    *,
    with_checksums: bool,
) -> tuple[list[WriteRun], list[Status]]:
    """The messages that carry out a batch, and the statuses of keys that cannot be written.

    Checked here, before a byte moves: a wrong size or order would spoil what is committed already.
    """
    begin, end = batch.layer_begin, batch.layer_end
    num_layers = end - begin
    statuses = [Status.INVALID] * len(batch.keys)
    runs: list[WriteRun] = []
    open_runs: dict[int, WriteRun] = {}
    for index, (key, buffer) in enumerate(zip(batch.keys, batch.buffers, strict=True)):
        views = as_views(buffer)
        reservation = reservations.get(key)
        if reservation is None:
            statuses[index] = Status.ABANDONED
            continue
        share_bytes = reservation.size_bytes // reservation.num_layers * num_layers
        in_order = begin == reservation.next_layer and end <= reservation.num_layers
        if not in_order or total_bytes(views) != share_bytes:
            continue
        if share_bytes > limits.max_payload_bytes:
            statuses[index] = Status.TOO_LARGE
            continue
        run = open_runs.get(share_bytes)
        max_keys = min(limits.max_keys, limits.max_payload_bytes // share_bytes)
        if run is None or len(run.keys) == max_keys:
            run = open_runs[share_bytes] = WriteRun(share_bytes)
            runs.append(run)
        reservation.next_layer = end
        run.indices.append(index)
        run.keys.append(key)
        run.reservations.append(reservation)
        run.views.append(views)
        if batch.checksums:
            run.checksums += batch.checksums[index * num_layers : (index + 1) * num_layers]
        elif with_checksums:
            run.checksums += layer_checksums(views, num_layers)
    return runs, statuses


class CommitPart(StatusPart):
    """The end of a WriteRun. Forgets the reservations of what is sealed or lost."""

    def __init__(self, call: Call, run: WriteRun, layer_end: int, reservations: dict[bytes, Reservation]):
        super().__init__(call, run.indices, [run.share_bytes] * len(run.keys))
        self._run = run
        self._layer_end = layer_end
        self._reservations = reservations

    def finish(self, outcome: Outcome, deadline: float) -> list[Status]:
        statuses = super().finish(outcome, deadline)
        for key, reservation, status in zip(self._run.keys, self._run.reservations, statuses, strict=True):
            is_sealed = status is Status.OK and self._layer_end == reservation.num_layers
            is_lost = status in (Status.ABANDONED, Status.CORRUPT, Status.UNAVAILABLE)
            if (is_sealed or is_lost) and self._reservations.get(key) is reservation:
                del self._reservations[key]
        return statuses
