"""Moves pages between device pools and the store: loads layer by layer, saves whole. For the linker."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from kvcore.transport.base import Transfer
from kvcore.wire.messages import Status
from sglang_hicache_backend.device_pages import DevicePages, SideStream, Stage
from sglang_hicache_backend.page_store import PageStore, Pool

# Pinned memory. Of a load so many pieces are on their way at once; a save fills one after the other.
STAGE_BYTES = 32 << 20
LOAD_STAGES = 4
# What the pieces still on their way may take after one of them has failed.
GRACE_MS = 2000.0


class LoadError(Exception):
    """A layer did not arrive; the requests that wait for it cannot go on."""


class PageRun(NamedTuple):
    """Pages of one pool: what they are called in the store, and where they begin in the pool's tensors."""

    pool_name: str
    page_hashes: Sequence[str]
    rows: Sequence[int]


class _Piece(NamedTuple):
    """Some pages of one step of a pool (DevicePages.steps)."""

    engine_layer: int
    pool: Pool
    pages: DevicePages
    positions: range
    page_hashes: Sequence[str]
    rows: Sequence[int]


class _Coming(NamedTuple):
    piece: _Piece
    stage: Stage
    transfer: Transfer


class LayerLoader:
    """Used by one thread."""

    def __init__(
        self,
        store: PageStore,
        pages: Mapping[str, DevicePages],
        device: torch.device,
        stream: SideStream,
        timeout_ms: float,
    ) -> None:
        self._store = store
        self._pages = pages
        self._stream = stream
        self._timeout_ms = timeout_ms
        size_bytes = max([STAGE_BYTES, *(each.step_size_bytes for each in pages.values())])
        self._stages = [Stage(size_bytes, device) for _ in range(LOAD_STAGES)]
        self._stage_bytes = size_bytes

    def load(self, runs: Sequence[PageRun], num_layers: int, on_layer: Callable[[int], None]) -> None:
        """Calls `on_layer` with 0, 1, ... num_layers - 1, each as soon as all layers up to it are on the
        device. LoadError when pages are missing or late; then nothing writes to the device any more."""
        coming: deque[_Coming] = deque()
        free = list(self._stages)
        pieces = self._pieces(runs)
        num_done = 0
        try:
            while True:
                while free and (piece := next(pieces, None)) is not None:
                    coming.append(self._start(piece, free.pop()))
                # Layers before that of the oldest piece on its way are complete.
                num_complete = coming[0].piece.engine_layer if coming else num_layers
                for layer in range(num_done, num_complete):
                    on_layer(layer)
                num_done = max(num_done, num_complete)
                if not coming:
                    return
                free.append(self._finish(coming.popleft()))
        finally:
            # Their stages are used again. An answer that has begun to arrive is let in: to give it up would
            # cost the connection, and with it the loads of others.
            for late in coming:
                late.transfer.wait(GRACE_MS)

    def _pieces(self, runs: Sequence[PageRun]) -> Iterator[_Piece]:
        """In the order in which the engine will want them."""
        found: list[tuple[int, Pool, DevicePages, range, PageRun]] = []
        for run in runs:
            pool, pages = self._store.pool(run.pool_name), self._pages.get(run.pool_name)
            if pool is None or pages is None:
                raise LoadError(f"there is no pool {run.pool_name!r}")
            found += [(layer, pool, pages, positions, run) for layer, positions in pages.steps()]
        for layer, pool, pages, positions, run in sorted(found, key=lambda step: step[0]):
            count = max(1, self._stage_bytes // pages.step_size_bytes)
            for first in range(0, len(run.rows), count):
                end = first + count
                yield _Piece(layer, pool, pages, positions, run.page_hashes[first:end], run.rows[first:end])

    def _start(self, piece: _Piece, stage: Stage) -> _Coming:
        buffers = stage.pieces(len(piece.rows), piece.pages.step_size_bytes)
        # Of an object that is read whole, its one layer in the store is layer 0, too.
        layer = piece.positions.start
        return _Coming(piece, stage, self._store.start_layer(piece.pool, piece.page_hashes, layer, buffers))

    def _finish(self, coming: _Coming) -> Stage:
        piece = coming.piece
        statuses = coming.transfer.wait(self._timeout_ms)
        lost = [status for status in statuses if status is not Status.OK]
        if lost:
            name = piece.pages.facts.name
            raise LoadError(f"{len(lost)} of {len(statuses)} pages of {name} did not come: {lost[0].name}")
        with self._stream:
            piece.pages.scatter(piece.rows, piece.positions, coming.stage.tensor)
            self._stream.wait()
        return coming.stage


class PageSaver:
    """Used by one thread."""

    def __init__(
        self, store: PageStore, pages: Mapping[str, DevicePages], device: torch.device, stream: SideStream
    ) -> None:
        self._store = store
        self._pages = pages
        self._stream = stream
        self._stage_bytes = max([STAGE_BYTES, *(each.object_size_bytes for each in pages.values())])
        self._stage = Stage(self._stage_bytes, device)

    def save(self, run: PageRun) -> bool:
        """Whether all of these pages are stored."""
        pool, pages = self._store.pool(run.pool_name), self._pages.get(run.pool_name)
        if pool is None or pages is None:
            return False
        count = max(1, self._stage_bytes // pages.object_size_bytes)
        for first in range(0, len(run.rows), count):
            rows = run.rows[first : first + count]
            with self._stream:
                pages.gather(rows, self._stage.tensor)
                self._stream.wait()
            buffers = self._stage.pieces(len(rows), pages.object_size_bytes)
            if not all(self._store.save_from(pool, run.page_hashes[first : first + count], buffers)):
                return False
        return True


def runs_of(transfers: Sequence[Any], pages: Mapping[str, DevicePages]) -> list[PageRun]:
    """Of SGLang's transfers, after DevicePoolGroup.resolve_transfers."""
    return [
        PageRun(
            str(transfer.name), list(transfer.keys), pages[str(transfer.name)].rows(transfer.host_indices)
        )
        for transfer in transfers
    ]
