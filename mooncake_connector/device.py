"""What the staged path asks of an accelerator: three queues of work, and marks to put them in order."""

import enum
from collections.abc import Sequence
from typing import Protocol

from mooncake_connector.kv_memory import Done, HostRows


class Lane(enum.Enum):
    """A queue of work of the device; within one, work is done in the order in which it was queued."""

    COMPUTE = "compute"  # the engine's own: whatever stream is current when its thread calls us
    SAVE = "save"  # device -> host
    LOAD = "load"  # host -> device


class Device(Protocol):
    """All methods queue work and return; any thread may call them, those on COMPUTE only the engine's."""

    def make_rows(self, num_rows: int, row_size_bytes: int) -> HostRows:
        """Host memory that the device can reach by itself (pinned), kept as long as the result is."""
        ...

    def mark(self, lane: Lane) -> Done:
        """Reached when everything queued on `lane` so far has been done."""
        ...

    def order(self, lane: Lane, done: Done) -> None:
        """What is queued on `lane` from now on begins after `done`. The calling thread does not wait."""
        ...

    def gather(self, layer: int, block_ids: Sequence[int], rows: HostRows, first_row: int) -> None:
        """On SAVE: one layer of block_ids[i] -> row first_row + i."""
        ...

    def scatter(self, layer: int, block_ids: Sequence[int], rows: HostRows, first_row: int) -> None:
        """On LOAD: row first_row + i -> one layer of block_ids[i]."""
        ...

    def zero(self, block_ids: Sequence[int]) -> None:
        """On LOAD: all layers of the blocks."""
        ...
