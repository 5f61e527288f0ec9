"""The SSD tier as the core sees it: objects of the catalogue to and from disk, outcomes back to the core."""

import logging
import struct
from collections.abc import Callable, Iterator, Sequence

from kvcore.metrics import SSD_PREFIX
from kvcore.units import format_size
from kvcore.wire.messages import Status, Tier
from store_server.core.objects import StoredObject
from store_server.core.owners import Quota
from store_server.core.placements import PlacementLog
from store_server.core.store import Store
from store_server.core.tiering import Acceptance, ColdObject
from store_server.ssd import (
    Dropped,
    Loaded,
    ReadRequest,
    Removed,
    SsdConfig,
    SsdTier,
    WriteRequest,
    Written,
)
from store_server.ssd_quota import SsdQuotas

logger = logging.getLogger(__name__)


class SsdColdTier:
    """A `ColdTier`. `notify` is called from disk threads when `poll` has something to do. `open` and `close`
    block; everything else is the loop's. `on_pushed_out` gets what had to leave for its tenant's quota."""

    def __init__(
        self,
        config: SsdConfig,
        notify: Callable[[], None],
        on_pushed_out: Callable[[Sequence[bytes]], None],
        placements: PlacementLog | None = None,
        quotas: Sequence[Quota] = (),
    ) -> None:
        self._tier = SsdTier(config, notify)
        self._on_pushed_out = on_pushed_out
        self._placements = placements
        self.quotas = SsdQuotas(quotas)
        self._pool = memoryview(b"")

    def open(self, pool: memoryview) -> None:
        """ConfigError when no path can be used."""
        self._pool = pool
        report = self._tier.open()
        for key in list(self._tier):
            if location := self._tier.location(key):
                self._make_room_in_quota(key, location.size_bytes)
        logger.info(
            "SSD index rebuilt",
            extra={
                "objects": report.num_objects,
                "segments": report.num_segments,
                "segments_scanned": report.num_segments_scanned,
                "seconds": round(report.elapsed_s, 3),
                "capacity": format_size(self._tier.stats()["capacity_bytes"]),
                "failed_paths": report.failed_paths,
            },
        )

    def close(self) -> None:
        """Ends the disk threads after what was accepted has been written; no byte of the pool is touched
        afterwards."""
        self._tier.close()
        self._pool = memoryview(b"")

    def poll(self, store: Store) -> None:
        """Tells the core what has happened on the disks."""
        for outcome in self._tier.poll():
            if isinstance(outcome, Written):
                if outcome.status is not Status.OK:
                    self.quotas.forget((outcome.request.key,))
                elif self._placements is not None:
                    self._placements.stored((outcome.request.key,), Tier.SSD)
                store.space.written(outcome.request.token, outcome.status)
            elif isinstance(outcome, Loaded):
                status = Status.MISSING if outcome.status is Status.UNAVAILABLE else outcome.status
                store.promotions.loaded(outcome.request.token, status, outcome.checksums)
            elif isinstance(outcome, Dropped):
                logger.info(
                    "objects left the SSD", extra={"objects": len(outcome.keys), "why": outcome.reason}
                )
                if self._placements is not None:
                    self._placements.removed(outcome.keys, Tier.SSD)
                self.quotas.forget(outcome.keys)
                store.space.no_longer_cold(outcome.keys)
            else:
                assert isinstance(outcome, Removed)

    def verify(self, on_progress: Callable[[int, int], None]) -> tuple[int, list[bytes]]:
        """Blocks, for a worker thread: (objects checked, keys found corrupt), see SsdTier.verify."""
        return self._tier.verify(on_progress)

    def stats(self) -> dict[str, float]:
        return {SSD_PREFIX + name: value for name, value in self._tier.stats().items()}

    # ---- ColdTier --------------------------------------------------------------------------------------

    @property
    def metadata_bytes(self) -> int:
        return self._tier.metadata_bytes

    def __len__(self) -> int:
        return len(self._tier)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._tier)

    def find(self, key: bytes) -> ColdObject | None:
        location = self._tier.location(key)
        self.quotas.touch(key)
        return None if location is None else ColdObject(location.size_bytes, location.num_layers)

    def write_back(self, obj: StoredObject) -> Acceptance:
        checksums = struct.unpack(f"<{len(obj.checksums) // 8}Q", obj.checksums)
        if len(checksums) != obj.num_layers or 0 in checksums:
            checksums = ()  # the writer left some out; then all are computed on the way
        if not self.quotas.fits(obj.key, obj.size_bytes):
            return Acceptance.REFUSED
        acceptance = self._tier.write(
            WriteRequest(obj.key, self._views(obj), obj.size_bytes, obj.num_layers, checksums, obj)
        )
        if acceptance is Acceptance.QUEUED:
            self._make_room_in_quota(obj.key, obj.size_bytes)
        return acceptance

    def load(self, obj: StoredObject) -> bool:
        return self._tier.read(ReadRequest(obj.key, self._views(obj), obj))

    def remove(self, keys: Sequence[bytes]) -> None:
        if self._placements is not None:
            self._placements.removed([key for key in keys if key in self._tier], Tier.SSD)
        self.quotas.forget(keys)
        self._tier.remove(keys)

    def _make_room_in_quota(self, key: bytes, size_bytes: int) -> None:
        if leaving := self.quotas.add(key, size_bytes):
            self.remove(leaving)
            self._on_pushed_out(leaving)

    def _views(self, obj: StoredObject) -> list[memoryview]:
        extents = obj.extents
        return [self._pool[at : at + size] for at, size in zip(extents[::2], extents[1::2], strict=True)]
