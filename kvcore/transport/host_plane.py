"""What planes share that serve any buffer of this process: a batch is a read into a sink or a write."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from kvcore.layout import total_bytes
from kvcore.transport.base import Buffer, ReadBatch, Region, Transfer, WriteBatch, check_batch
from kvcore.transport.channel import Channel
from kvcore.transport.parts import Sink, UnpinnedRegion, exact_sink
from kvcore.transport.pool_view import ObjectView
from kvcore.wire.messages import Status


class HostPlane(ABC):
    channel: Channel

    def register(self, buffer: Buffer) -> Region:
        return UnpinnedRegion(buffer)

    def submit(self, batch: ReadBatch | WriteBatch) -> Transfer:
        check_batch(batch)
        if isinstance(batch, WriteBatch):
            return self.submit_write(batch)
        sink, sizes_bytes = exact_sink(batch)
        return self.submit_read(
            list(batch.keys), sizes_bytes, sink, batch.layer_begin, batch.layer_end, batch.wait_ms
        )

    @abstractmethod
    def submit_read(
        self,
        keys: list[bytes],
        sizes_bytes: Sequence[int],
        sink: Sink,
        layer_begin: int = 0,
        layer_end: int = 0,
        wait_ms: int = 0,
    ) -> Transfer:
        """As `submit`, but `sink` decides when the sizes are known; `sizes_bytes` are expectations."""

    @abstractmethod
    def submit_write(self, batch: WriteBatch) -> Transfer:
        """As `submit`; the batch has been checked."""

    @abstractmethod
    def submit_put(self, keys: list[bytes], values: Sequence[list[memoryview]]) -> Transfer:
        """Whole objects of one layer, reserved, written and sealed."""

    def read_one(self, key: bytes, size_bytes: int, sink: Sink) -> Status:
        """A whole object, now; `size_bytes` is an expectation, `sink` as in `submit_read`."""
        return self.submit_read([key], [size_bytes], sink).wait()[0]

    def view_one(self, key: bytes) -> ObjectView | None:
        """A whole object, copied: only shm has memory in common with the store."""
        views: list[memoryview] = []

        def sink(index: int, size_bytes: int) -> list[memoryview]:
            views[:] = [memoryview(bytearray(size_bytes))]
            return views

        if self.read_one(key, self.channel.max_payload_bytes, sink) is not Status.OK:
            return None
        return ObjectView([view.toreadonly() for view in views], total_bytes(views))

    def after_writes(self, say: Callable[[], None]) -> None:
        """Calls it when what was submitted before does not touch the pool any more: at once, where submitting
        is writing."""
        say()

    def settle(self) -> None:
        """Tells the store what may wait otherwise."""
        return

    def counters(self) -> dict[str, int | str]:
        """What only this plane counts."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Ends the connection, too."""

    def let_go(self) -> None:
        """The connection is lost: ends what the plane holds besides."""
        return

    def leave_to_parent(self) -> None:
        """In a forked child: what the plane holds besides the connection belongs to its parent."""
        return
