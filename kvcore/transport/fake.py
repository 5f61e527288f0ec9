"""A store in memory with scripted faults, and a Transport to it: a testing aid for whoever builds on kvcore.

It keeps the promises of the real store (first writer wins, layers in order, readers that follow a writer,
reservations that die with their client) in the plainest way, and can be told to be down, slow, full or
forgetful. kvcore.client.fake gives it the face of a StoreClient.
"""

import itertools
import threading
import time
from collections.abc import Sequence

from kvcore.layout import as_views, layer_span, split_views, total_bytes
from kvcore.transport.base import Buffer, ReadBatch, WriteBatch, check_batch
from kvcore.wire.messages import Status

DEFAULT_TIMEOUT_MS = 1000.0


class FakeObject:
    def __init__(self, owner: int, size_bytes: int, num_layers: int) -> None:
        self.owner = owner
        self.data = bytearray(size_bytes)
        self.num_layers = num_layers
        self.layers_ready = 0

    @property
    def sealed(self) -> bool:
        return self.layers_ready == self.num_layers


class FakeStore:
    """Shared by any number of clients and threads of one process.

    Set `delay_ms` to make every answer late, `full` to refuse reservations; see also `stop`, `start`, `lose`
    and `fail_next`. `objects` may be inspected freely; hold `changed` while other threads are at work.
    """

    def __init__(self, capacity_bytes: int = 1 << 30) -> None:
        self.capacity_bytes = capacity_bytes
        self.objects: dict[bytes, FakeObject] = {}
        self.changed = threading.Condition()
        self.delay_ms = 0.0
        self.full = False
        self.up = True
        self._abort_counts: dict[bytes, int] = {}
        self._aborted_at: dict[bytes, float] = {}
        self._owners = itertools.count(1)
        self._scripted: list[tuple[str, Status]] = []

    def stop(self, *, lose_contents: bool = True) -> None:
        """As if killed: waiters learn UNAVAILABLE, reservations are gone, and with lose_contents the rest."""
        with self.changed:
            self.up = False
            self.objects = {
                key: item for key, item in self.objects.items() if item.sealed and not lose_contents
            }
            self.changed.notify_all()

    def start(self) -> None:
        with self.changed:
            self.up = True
            self.changed.notify_all()

    def lose(self, keys: Sequence[bytes]) -> None:
        """Evicts these keys, whatever their state."""
        with self.changed:
            for key in keys:
                self.objects.pop(key, None)
            self.changed.notify_all()

    def fail_next(self, operation: str, status: Status) -> None:
        """The next key of a "read", "write" or "reserve" ends with `status`; calls queue up."""
        if operation not in ("read", "write", "reserve"):
            raise ValueError(f"operation is 'read', 'write' or 'reserve', not {operation!r}")
        with self.changed:
            self._scripted.append((operation, status))

    def new_owner(self) -> int:
        return next(self._owners)

    # The methods below are called with `changed` held.

    def scripted(self, operation: str) -> Status | None:
        for index, (wanted, status) in enumerate(self._scripted):
            if wanted == operation:
                del self._scripted[index]
                return status
        return None

    def reserve(self, owner: int, key: bytes, size_bytes: int, num_layers: int) -> Status:
        if (status := self.scripted("reserve")) is not None:
            return status
        if (found := self.objects.get(key)) is not None:
            return Status.EXISTS if found.sealed else Status.PENDING
        if size_bytes > self.capacity_bytes:
            return Status.TOO_LARGE
        used_bytes = sum(len(item.data) for item in self.objects.values())
        if self.full or used_bytes + size_bytes > self.capacity_bytes:
            return Status.FULL
        self.objects[key] = FakeObject(owner, size_bytes, num_layers)
        self._aborted_at.pop(key, None)
        return Status.OK

    def write(self, owner: int, key: bytes, begin: int, end: int, views: Sequence[memoryview]) -> Status:
        item = self.objects.get(key)
        if (status := self.scripted("write")) is not None:
            return status
        if item is None or item.owner != owner or item.sealed:
            return Status.ABANDONED
        if not begin == item.layers_ready < end <= item.num_layers:
            return Status.INVALID
        low, high = layer_span(len(item.data), item.num_layers, begin, end)
        if total_bytes(views) != high - low:
            return Status.INVALID
        item.data[low:high] = b"".join(views)
        item.layers_ready = end
        self.changed.notify_all()
        return Status.OK

    def read(self, key: bytes, begin: int, end: int, views: Sequence[memoryview]) -> Status:
        item = self.objects.get(key)
        if item is None:
            return Status.MISSING
        end = end or item.num_layers
        if not begin < end <= item.num_layers:
            return Status.INVALID
        if item.layers_ready < end:
            return Status.PENDING
        if (status := self.scripted("read")) is not None:
            return status
        low, high = layer_span(len(item.data), item.num_layers, begin, end)
        if total_bytes(views) != high - low:
            return Status.INVALID
        for view, [piece] in zip(
            [view for view in views if len(view)],
            split_views([memoryview(item.data)[low:high]], [len(view) for view in views if len(view)]),
            strict=True,
        ):
            view[:] = piece
        return Status.OK

    def abort(self, owner: int, keys: Sequence[bytes]) -> None:
        for key in keys:
            item = self.objects.get(key)
            if item is not None and not item.sealed and item.owner == owner:
                del self.objects[key]
            self._abort_counts[key] = self._abort_counts.get(key, 0) + 1
            if item is None or item.owner == owner:
                self._aborted_at[key] = time.monotonic()
        self.changed.notify_all()

    def forget_owner(self, owner: int) -> None:
        """Its connection is gone. Unlike after an abort, who asks later waits: it may come back and go on."""
        mine = [k for k, item in self.objects.items() if item.owner == owner and not item.sealed]
        self.abort(owner, mine)
        for key in mine:
            del self._aborted_at[key]

    def was_just_aborted(self, key: bytes) -> bool:
        """Within the last 2 s and not reserved since: waiting for it would be in vain (messages.Abort)."""
        return time.monotonic() - self._aborted_at.get(key, float("-inf")) <= 2.0

    def abort_count(self, key: bytes) -> int:
        return self._abort_counts.get(key, 0)


class FakeRegion:
    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes

    def close(self) -> None:
        pass


class FakeTransfer:
    """Moves its bytes when somebody waits or asks `done()`, like the real planes on a blocking socket."""

    def __init__(self, transport: "FakeTransport", batch: ReadBatch | WriteBatch) -> None:
        self._transport = transport
        self._store = transport.store
        self._batch = batch
        self._views = [as_views(buffer) for buffer in batch.buffers]
        self._statuses: list[Status | None] = [None] * len(batch.keys)
        started = time.monotonic()
        self._earliest = started + self._store.delay_ms / 1e3
        self._wait_ms = batch.wait_ms if isinstance(batch, ReadBatch) else 0
        self._latest = self._earliest + self._wait_ms / 1e3
        with self._store.changed:
            self._aborts = [self._store.abort_count(key) for key in batch.keys]
            if not self._usable():
                self._fill(Status.UNAVAILABLE)

    def done(self) -> bool:
        with self._store.changed:
            return self._progress()

    def wait(self, timeout_ms: float | None = None) -> list[Status]:
        if timeout_ms is None:
            timeout_ms = self._transport.timeout_ms + self._wait_ms
        deadline = time.monotonic() + timeout_ms / 1e3
        with self._store.changed:
            while not self._progress():
                now = time.monotonic()
                if now >= deadline:
                    self._fill(Status.TIMED_OUT)
                    break
                turn = self._earliest if now < self._earliest else self._latest
                self._store.changed.wait(max(0.0, min(turn, deadline) - now))
        return [Status(status) for status in self._statuses if status is not None]

    def _usable(self) -> bool:
        return self._store.up and not self._transport.closed

    def _fill(self, status: Status) -> None:
        self._statuses = [status if known is None else known for known in self._statuses]

    def _progress(self) -> bool:
        if None not in self._statuses:
            return True
        if not self._usable():
            self._fill(Status.UNAVAILABLE)
        elif time.monotonic() >= self._earliest:
            for index, known in enumerate(self._statuses):
                if known is None:
                    self._statuses[index] = self._try_key(index)
        return None not in self._statuses

    def _try_key(self, index: int) -> Status | None:
        key, views, batch = self._batch.keys[index], self._views[index], self._batch
        if isinstance(batch, WriteBatch):
            return self._store.write(self._transport.owner, key, batch.layer_begin, batch.layer_end, views)
        status = self._store.read(key, batch.layer_begin, batch.layer_end, views)
        if status not in (Status.MISSING, Status.PENDING) or batch.wait_ms == 0:
            return status
        if self._store.abort_count(key) != self._aborts[index] or self._store.was_just_aborted(key):
            return Status.ABANDONED
        return Status.TIMED_OUT if time.monotonic() >= self._latest else None


class FakeTransport:
    """One client's plane to a FakeStore; `owner` is what a connection is to the real one."""

    name = "fake"

    def __init__(self, store: FakeStore, *, timeout_ms: float = DEFAULT_TIMEOUT_MS) -> None:
        self.store = store
        self.owner = store.new_owner()
        self.timeout_ms = timeout_ms
        self.closed = False

    def register(self, buffer: Buffer) -> FakeRegion:
        return FakeRegion(memoryview(buffer).nbytes)

    def submit(self, batch: ReadBatch | WriteBatch) -> FakeTransfer:
        check_batch(batch)
        return FakeTransfer(self, batch)

    def close(self) -> None:
        with self.store.changed:
            self.closed = True
            self.store.forget_owner(self.owner)
