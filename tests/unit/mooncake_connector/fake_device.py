"""A device without hardware: queued work is done late, in any order that the marks allow, by whoever waits.

A copy that is not ordered behind what it needs, or before what would overwrite it, moves wrong bytes here in
some of the orders tried; on real hardware it would do so once in a while.
"""

import itertools
import random
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mooncake_connector.device import Lane
from mooncake_connector.kv_layout import KVLayout, array_span
from mooncake_connector.kv_memory import REACHED, Done, HostRows
from mooncake_connector.staged_memory import StagedMemory

_seeds = itertools.count()


class FakeMark:
    def __init__(self, device: "FakeDevice") -> None:
        self.reached = False
        self._device = device

    def wait(self) -> None:
        assert threading.get_ident() != self._device.engine_thread, "the engine's thread waits for the device"
        self._device.run_until(self)


class FakeDevice:
    """`favourite` lanes work whenever they can; by default the next one to work is drawn by lot."""

    def __init__(
        self,
        layers: Mapping[str, Any],
        layout: KVLayout,
        favourite: Sequence[Lane] = (),
        seed: int | None = None,
    ) -> None:
        self.engine_thread = threading.get_ident()
        self._blocks = []
        for layer, name in enumerate(layout.layer_names):
            _, shape, strides = layout.blocks(layer)
            self._blocks.append(np.lib.stride_tricks.as_strided(layers[name], shape, strides))
        self._favourite = list(favourite)
        self._random = random.Random(next(_seeds) if seed is None else seed)
        self._lanes: dict[Lane, deque[FakeMark | Callable[[], None]]] = {lane: deque() for lane in Lane}
        self._lock = threading.RLock()

    # ---- Device

    def make_rows(self, num_rows: int, row_size_bytes: int) -> HostRows:
        return HostRows(np.full((num_rows, row_size_bytes), 251, dtype=np.uint8))

    def mark(self, lane: Lane) -> FakeMark:
        mark = FakeMark(self)
        self.queue(lane, lambda: setattr(mark, "reached", True))
        return mark

    def order(self, lane: Lane, done: Done) -> None:
        if done is REACHED:
            return
        assert isinstance(done, FakeMark)
        with self._lock:
            self._lanes[lane].append(done)

    def gather(self, layer: int, block_ids: Sequence[int], rows: HostRows, first_row: int) -> None:
        def work() -> None:
            for row, block_id in enumerate(block_ids, first_row):
                rows.array[row] = self._blocks[layer][block_id].reshape(-1)

        self.queue(Lane.SAVE, work)

    def scatter(self, layer: int, block_ids: Sequence[int], rows: HostRows, first_row: int) -> None:
        def work() -> None:
            for row, block_id in enumerate(block_ids, first_row):
                block = self._blocks[layer][block_id]
                block[...] = rows.array[row].reshape(block.shape)

        self.queue(Lane.LOAD, work)

    def zero(self, block_ids: Sequence[int]) -> None:
        def work() -> None:
            for blocks in self._blocks:
                for block_id in block_ids:
                    blocks[block_id] = 0

        self.queue(Lane.LOAD, work)

    # ---- the hardware

    def queue(self, lane: Lane, work: Callable[[], None]) -> None:
        with self._lock:
            self._lanes[lane].append(work)

    def run_until(self, mark: FakeMark) -> None:
        with self._lock:
            while not mark.reached:
                assert self._work_once(), "a mark that can never be reached: the lanes wait for each other"

    def finish(self) -> None:
        """Does all that is queued."""
        with self._lock:
            while self._work_once():
                pass
            assert not any(self._lanes.values()), "work that can never begin"

    def _work_once(self) -> bool:
        for lane in [*self._favourite, *self._random.sample(list(Lane), len(Lane))]:
            lane_work = self._lanes[lane]
            while lane_work and isinstance(lane_work[0], FakeMark) and lane_work[0].reached:
                lane_work.popleft()
            if lane_work and not isinstance(lane_work[0], FakeMark):
                work = lane_work.popleft()
                assert not isinstance(work, FakeMark)
                work()
                return True
        return False


def staged_memory(
    layers: Mapping[str, Any],
    num_blocks: int,
    load_staging_size_bytes: int,
    favourite: Sequence[Lane] = (),
    seed: int | None = None,
) -> tuple[StagedMemory, FakeDevice]:
    layout = KVLayout({name: array_span(name, array) for name, array in layers.items()}, num_blocks)
    device = FakeDevice(layers, layout, favourite, seed)
    return StagedMemory(layout, device, load_staging_size_bytes), device
