"""A tier driven step by step from a test: what the store's loop does, made blocking."""

import os
import threading
from collections.abc import Sequence
from pathlib import Path

from kvcore.wire.messages import Status
from store_server.core.tiering import Acceptance
from store_server.ssd import (
    DiskConfig,
    Dropped,
    Loaded,
    ReadRequest,
    Removed,
    SsdConfig,
    SsdTier,
    WriteRequest,
    Written,
)
from store_server.ssd.aligned import AlignedBuffer
from store_server.ssd.disk_io import DiskIo
from store_server.ssd.rebuild import RebuildReport
from store_server.ssd.types import Outcome

DEADLINE_S = 30.0
SEGMENT_BYTES = 1 << 20


def key_of(number: int) -> bytes:
    return number.to_bytes(4, "big") * 8


class Driver:
    """`outcomes` collects everything the tier said; use as a context manager to close it."""

    def __init__(
        self,
        *paths: Path,
        capacity_bytes: int = 16 * SEGMENT_BYTES,
        segment_bytes: int = SEGMENT_BYTES,
        io: DiskIo | None = None,
        retry_s: float = 0.05,
        queue_bytes: int = 8 << 20,
        batch_bytes: int = 256 << 10,
    ) -> None:
        disks = tuple(
            DiskConfig(path=path, capacity_bytes=capacity_bytes, segment_bytes=segment_bytes)
            for path in paths
        )
        self._ready = threading.Event()
        self.tier = SsdTier(
            SsdConfig(
                disks=disks,
                linger_ms=0.5,
                retry_s=retry_s,
                queue_bytes=queue_bytes,
                batch_bytes=batch_bytes,
                read_threads=2,
            ),
            self._ready.set,
            io,
        )
        self.outcomes: list[Outcome] = []
        self.report: RebuildReport | None = None
        self._closed = False

    def __enter__(self) -> "Driver":
        self.report = self.tier.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.tier.close()
            self.outcomes += self.tier.poll()

    def step(self) -> list[Outcome]:
        """Wait for outcomes and take them."""
        assert self._ready.wait(DEADLINE_S), "the tier said nothing"
        self._ready.clear()
        outcomes = self.tier.poll()
        self.outcomes += outcomes
        return outcomes

    def begin_put(
        self, key: bytes, data: bytes, num_layers: int = 1, checksums: Sequence[int] = ()
    ) -> Acceptance:
        view = memoryview(data)
        halves = [view[: len(view) // 2], view[len(view) // 2 :]]
        return self.tier.write(WriteRequest(key, halves, len(data), num_layers, checksums))

    def put(self, key: bytes, data: bytes, num_layers: int = 1) -> Status:
        """Write back and wait for it; while the queues are full, waits like the put path does."""
        while (acceptance := self.begin_put(key, data, num_layers)) is Acceptance.BUSY:
            self.step()
        if acceptance is Acceptance.REFUSED:
            return Status.FULL
        while True:
            for outcome in self.step():
                if isinstance(outcome, Written) and outcome.request.key == key:
                    return outcome.status

    def load(self, key: bytes, *, aligned: bool = True) -> tuple[Status, bytes, Sequence[int]]:
        location = self.tier.location(key)
        if location is None:
            return Status.MISSING, b"", ()
        size_bytes = location.size_bytes
        if aligned:
            buffer = AlignedBuffer(size_bytes).take(size_bytes)[:size_bytes]
        else:
            buffer = memoryview(bytearray(size_bytes + 1))[1:]
        assert self.tier.read(ReadRequest(key, [buffer]))
        while True:
            for outcome in self.step():
                if isinstance(outcome, Loaded) and outcome.request.key == key:
                    return outcome.status, bytes(buffer), outcome.checksums

    def get(self, key: bytes, *, aligned: bool = True) -> bytes | None:
        status, data, _ = self.load(key, aligned=aligned)
        return data if status == Status.OK else None

    def remove(self, *keys: bytes) -> None:
        """Remove and wait until that is durable. The keys must be there."""
        self.tier.remove(keys)
        waiting = set(keys)
        while waiting:
            for outcome in self.step():
                if isinstance(outcome, Removed):
                    waiting -= set(outcome.keys)

    def dropped(self) -> dict[bytes, str]:
        return {key: o.reason for o in self.outcomes if isinstance(o, Dropped) for key in o.keys}


def make_data(number: int, size_bytes: int) -> bytes:
    return (number.to_bytes(8, "little") * (size_bytes // 8 + 1))[:size_bytes]


def data_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("segment-*.kv"))


def flip_byte(path: Path, offset: int) -> None:
    fd = os.open(path, os.O_RDWR)
    try:
        byte = os.pread(fd, 1, offset)
        os.pwrite(fd, bytes([byte[0] ^ 0xFF]), offset)
    finally:
        os.close(fd)
