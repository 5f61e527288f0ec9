"""What planes share whose bytes are moved by the host's processor: any buffer will do, and a batch is a read
into a sink or a write."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from kvcore.transport.base import Buffer, ReadBatch, WriteBatch, check_batch
from kvcore.transport.parts import PartsTransfer, Sink, UnpinnedRegion, exact_sink


class HostPlane(ABC):
    def register(self, buffer: Buffer) -> UnpinnedRegion:
        return UnpinnedRegion(buffer)

    def submit(self, batch: ReadBatch | WriteBatch) -> PartsTransfer:
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
    ) -> PartsTransfer:
        """As `submit`, but `sink` decides when the sizes are known; `sizes_bytes` are expectations."""

    @abstractmethod
    def submit_write(self, batch: WriteBatch) -> PartsTransfer:
        """As `submit`; the batch has been checked."""
