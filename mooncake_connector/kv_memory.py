"""How KV blocks get between the engine's tensors and buffers of which the store's client can read and write.

Two ways behind one interface: HostMemory (the KV cache lies in host memory: loads write straight into it) and
StagedMemory (it lies on a device: bytes pass through pinned host memory, copied on streams of our own).
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from mooncake_connector.kv_layout import ByteArray, KVLayout


class HostRows:
    """Host memory [num_rows, row_size_bytes]; a row is one layer of one block, as its object has it.

    `handle`: what the device's own library knows this memory by (a torch tensor), None for plain memory.
    """

    def __init__(self, array: ByteArray, handle: Any = None) -> None:
        self.array = array
        self.handle = handle

    def row(self, index: int) -> memoryview:
        row: memoryview = self.array[index].data
        return row

    def all_rows(self) -> memoryview:
        rows: memoryview = self.array.reshape(-1).data
        return rows


def plain_rows(num_rows: int, row_size_bytes: int) -> HostRows:
    """Touched row by row as it is used, so an idle engine does not pay for all of it."""
    return HostRows(np.empty((num_rows, row_size_bytes), dtype=np.uint8))


class Done(Protocol):
    """A point in the work of a device."""

    def wait(self) -> None:
        """Blocks the calling thread until the device has got there. Never called by the engine's thread."""
        ...


class _Reached:
    def wait(self) -> None:
        return


REACHED: Done = _Reached()


class Landing(Protocol):
    """Where layers of some blocks arrive from the store. One thread uses it, and releases it."""

    def buffers(self, layer_begin: int, layer_end: int, index: int) -> list[memoryview]:
        """Writable views for layers [layer_begin, layer_end) of the landing's block `index`."""
        ...

    def deliver(self, layer: int, begin: int, end: int) -> None:
        """`layer` of blocks [begin, end) has arrived here: it goes on into the engine's tensors."""
        ...

    def release(self) -> None:
        """No transfer writes to the buffers any more. Does not wait for what was delivered."""
        ...


class KVMemory(Protocol):
    """The KV cache of one rank. Methods say which thread calls them; none of the engine's waits."""

    layout: KVLayout

    def make_rows(self, num_rows: int, row_size_bytes: int) -> HostRows: ...

    def arrivals(self) -> list[memoryview]:
        """All host memory that buffers of landings lie in."""
        ...

    # ---- engine's thread

    def copy_out(self, layer: int, block_ids: Sequence[int], rows: HostRows, slots: Sequence[int]) -> Done:
        """Copies one layer of block_ids[i], as computed by what the engine has queued so far, to row
        slots[i]. The rows hold it once Done is reached."""
        ...

    def end_saves(self) -> None:
        """The engine may overwrite copied blocks with what it queues from now on."""
        ...

    def begin_loads(self) -> None:
        """Blocks delivered from now on may be those that the engine's queued work still uses."""
        ...

    def engine_after(self, done: Done) -> None:
        """What the engine queues from now on sees what was delivered before `done`."""
        ...

    # ---- load threads

    def max_blocks(self, num_layers: int, *, follows: bool = False) -> int:
        """How many blocks a landing of `num_layers` layers may have; at least 1."""
        ...

    def land(
        self,
        block_ids: Sequence[int],
        layer_begin: int,
        layer_end: int,
        *,
        timeout_ms: float,
        follows: bool = False,
    ) -> Landing | None:
        """Room for layers of blocks, None when none became free in time. A thread that holds a landing asks
        with timeout 0 only, or all might wait for each other. `follows`: may be held for long."""
        ...

    def zero(self, block_ids: Sequence[int]) -> None:
        """Fills blocks with zeros: attention reads whole blocks, and 0 * NaN would spoil other requests."""
        ...

    def delivered(self) -> Done:
        """Reached when all that was delivered or zeroed so far is in the engine's tensors."""
        ...
