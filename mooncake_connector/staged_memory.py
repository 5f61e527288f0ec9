"""A KV cache on a device: every byte passes through pinned host memory, copied on streams of our own.

Nobody's thread waits for the device but our save and load threads; the engine's work and our copies are put
in order on the device, where
  a layer is copied out after what the engine had queued when it announced the layer,
  the engine's next step begins after all copies out: its blocks may be overwritten then,
  blocks are loaded after all that the engine had queued when the load began: it may still use them,
  a layer is attended to after its copy in (synchronous loads; asynchronous ones are reported after theirs).
"""

from collections.abc import Iterator, Sequence

from kvcore.errors import ConfigError
from kvcore.units import format_size
from mooncake_connector.device import Device, Lane
from mooncake_connector.kv_layout import KVLayout
from mooncake_connector.kv_memory import REACHED, Done, HostRows
from mooncake_connector.load_ring import LoadRing

# More are of no use: two or three requests keep a link to the device busy.
MAX_BUFFERS = 8


class StagedMemory:
    """`load_staging_size_bytes` is shared by two rings: one for blocks that are in the store, and one for
    those that a prefill engine is still computing, which may take seconds and must not hold up the others.

    Raises ConfigError when a ring would not hold one block.
    """

    def __init__(self, layout: KVLayout, device: Device, load_staging_size_bytes: int) -> None:
        self.layout = layout
        self._device = device
        self._last_save: Done | None = None
        ring_blocks = load_staging_size_bytes // 2 // layout.block_size_bytes
        if ring_blocks == 0:
            raise ConfigError(
                f"load_staging_size_bytes of {format_size(load_staging_size_bytes)} does not hold two blocks "
                f"of {format_size(layout.block_size_bytes)}: make it larger"
            )
        num_buffers = min(ring_blocks, MAX_BUFFERS)
        buffer_rows = ring_blocks // num_buffers * layout.num_layers
        ring_rows = num_buffers * buffer_rows
        rows = device.make_rows(2 * ring_rows, layout.layer_size_bytes)
        self._rows = rows
        self._sealed = LoadRing(rows, 0, num_buffers, buffer_rows)
        self._followed = LoadRing(rows, ring_rows, num_buffers, buffer_rows)

    def make_rows(self, num_rows: int, row_size_bytes: int) -> HostRows:
        return self._device.make_rows(num_rows, row_size_bytes)

    def arrivals(self) -> list[memoryview]:
        return [self._rows.all_rows()]

    # ---- engine's thread

    def copy_out(self, layer: int, block_ids: Sequence[int], rows: HostRows, slots: Sequence[int]) -> Done:
        if not block_ids:
            return REACHED
        self._device.order(Lane.SAVE, self._device.mark(Lane.COMPUTE))
        try:
            for begin, end in _runs(slots):
                self._device.gather(layer, block_ids[begin:end], rows, slots[begin])
        finally:
            # Also of what was queued before an error: the engine must not overwrite its blocks too early.
            done = self._last_save = self._device.mark(Lane.SAVE)
        return done

    def end_saves(self) -> None:
        if self._last_save is not None:
            self._device.order(Lane.COMPUTE, self._last_save)
            self._last_save = None

    def begin_loads(self) -> None:
        self._device.order(Lane.LOAD, self._device.mark(Lane.COMPUTE))

    def engine_after(self, done: Done) -> None:
        self._device.order(Lane.COMPUTE, done)

    # ---- load threads

    def max_blocks(self, num_layers: int, *, follows: bool = False) -> int:
        return self._ring(follows).buffer_rows // num_layers

    def land(
        self,
        block_ids: Sequence[int],
        layer_begin: int,
        layer_end: int,
        *,
        timeout_ms: float,
        follows: bool = False,
    ) -> "_Staged | None":
        ring = self._ring(follows)
        num_rows = len(block_ids) * (layer_end - layer_begin)
        if num_rows > ring.buffer_rows:
            raise ValueError(f"{num_rows} rows do not fit a buffer of {ring.buffer_rows}; see max_blocks")
        first_row = ring.take(timeout_ms)
        return None if first_row is None else _Staged(self._device, ring, first_row, block_ids, layer_begin)

    def zero(self, block_ids: Sequence[int]) -> None:
        self._device.zero(block_ids)

    def delivered(self) -> Done:
        return self._device.mark(Lane.LOAD)

    def _ring(self, follows: bool) -> LoadRing:
        return self._followed if follows else self._sealed


class _Staged:
    """Rows in layer-major order, so that a layer of all blocks is one copy to the device."""

    def __init__(
        self, device: Device, ring: LoadRing, first_row: int, block_ids: Sequence[int], layer_begin: int
    ) -> None:
        self._device = device
        self._ring = ring
        self._first_row = first_row
        self._block_ids = block_ids
        self._layer_begin = layer_begin
        self._delivers = False

    def _row(self, layer: int, index: int) -> int:
        return self._first_row + (layer - self._layer_begin) * len(self._block_ids) + index

    def buffers(self, layer_begin: int, layer_end: int, index: int) -> list[memoryview]:
        return [self._ring.rows.row(self._row(layer, index)) for layer in range(layer_begin, layer_end)]

    def deliver(self, layer: int, begin: int, end: int) -> None:
        self._delivers = True
        self._device.scatter(layer, self._block_ids[begin:end], self._ring.rows, self._row(layer, begin))

    def release(self) -> None:
        self._ring.give(self._first_row, self._device.mark(Lane.LOAD) if self._delivers else REACHED)


def _runs(slots: Sequence[int]) -> Iterator[tuple[int, int]]:
    """[begin, end) of the pieces of `slots` that count up by one."""
    begin = 0
    for position in range(1, len(slots) + 1):
        if position == len(slots) or slots[position] != slots[position - 1] + 1:
            yield begin, position
            begin = position
