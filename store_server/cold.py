"""The SSD tier as the core sees it: objects of the catalogue to and from disk, outcomes back to the core."""

import logging
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kvcore.metrics import SSD_PREFIX
from kvcore.units import format_size
from kvcore.wire.messages import Status, Tier
from store_server.core.objects import StoredObject
from store_server.core.owners import Quota
from store_server.core.placements import PlacementLog
from store_server.core.store import Store
from store_server.core.tiering import Acceptance, ColdObject
from store_server.level_quotas import LevelQuotas
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

logger = logging.getLogger(__name__)


class SsdColdTier:
    """A `ColdTier`. `notify` is called from disk threads when `poll` has something to do. `open` and `close`
    block; everything else is the loop's. `on_pushed_out` gets what had to leave for its tenant's quota,
    `on_written` the key of each object that has been written."""

    def __init__(
        self,
        config: SsdConfig,
        notify: Callable[[], None],
        on_pushed_out: Callable[[Sequence[bytes]], None],
        placements: PlacementLog | None = None,
        quotas: Sequence[Quota] = (),
        on_written: Callable[[bytes], None] = lambda key: None,
    ) -> None:
        self._tier = SsdTier(config, notify)
        self._on_pushed_out = on_pushed_out
        self._on_written = on_written
        self._placements = placements
        self.quotas = LevelQuotas({quota.prefix: quota.ssd_bytes for quota in quotas})
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
                else:
                    self._on_written(outcome.request.key)
                    if self._placements is not None:
                        self._placements.stored((outcome.request.key,), Tier.SSD)
                if isinstance(outcome.request.token, StoredObject):
                    store.space.written(outcome.request.token, outcome.status)
                else:
                    outcome.request.token(outcome)
            elif isinstance(outcome, Loaded):
                token = outcome.request.token
                if not isinstance(token, StoredObject):
                    token(outcome)
                    continue
                status = Status.MISSING if outcome.status is Status.UNAVAILABLE else outcome.status
                store.promotions.loaded(token, status, outcome.checksums)
            elif isinstance(outcome, Dropped):
                # A full disk reclaims segments all the time.
                logger.log(
                    logging.DEBUG if outcome.reason == "reclaimed" else logging.INFO,
                    "objects left the SSD",
                    extra={"objects": len(outcome.keys), "why": outcome.reason},
                )
                if self._placements is not None:
                    self._placements.removed(outcome.keys, Tier.SSD)
                self.quotas.forget(outcome.keys)
                store.space.no_longer_cold(outcome.keys)
            else:
                assert isinstance(outcome, Removed)

    @property
    def directories(self) -> list[Path]:
        """Of the paths in service, where other files may lie beside the segments."""
        return self._tier.directories

    def verify(self, on_progress: Callable[[int, int], None]) -> tuple[int, list[bytes]]:
        """Blocks, for a worker thread: (objects checked, keys found corrupt), see SsdTier.verify."""
        return self._tier.verify(on_progress)

    def stats(self) -> dict[str, float]:
        return {SSD_PREFIX + name: value for name, value in self._tier.stats().items()}

    # ---- ColdTier --------------------------------------------------------------------------------------

    @property
    def metadata_bytes(self) -> int:
        return self._tier.metadata_bytes

    @property
    def delays_writers(self) -> bool:
        return True

    def __len__(self) -> int:
        return len(self._tier)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._tier)

    def find(self, key: bytes) -> ColdObject | None:
        self.quotas.touch(key)
        return self.place(key)

    def place(self, key: bytes) -> ColdObject | None:
        """As `find`, without being a use of it."""
        location = self._tier.location(key)
        return None if location is None else ColdObject(location.size_bytes, location.num_layers)

    def write_back(self, obj: StoredObject) -> Acceptance:
        return self._write(obj, obj)

    def copy(self, obj: StoredObject, on_written: Callable[[Written], None]) -> Acceptance:
        """Written as well as kept in DRAM; the caller counts as a user of the bytes until it is told the end
        of it, by `poll`."""
        return self._write(obj, on_written)

    def _write(self, obj: StoredObject, token: StoredObject | Callable[[Written], None]) -> Acceptance:
        if not self.quotas.fits(obj.key, obj.size_bytes):
            return Acceptance.REFUSED
        acceptance = self._tier.write(
            WriteRequest(
                obj.key,
                views_of(self._pool, obj),
                obj.size_bytes,
                obj.num_layers,
                given_checksums(obj),
                token,
            )
        )
        if acceptance is Acceptance.QUEUED:
            self._make_room_in_quota(obj.key, obj.size_bytes)
        return acceptance

    def has_copy(self, key: bytes) -> bool:
        return key in self._tier

    def tiers_of(self, key: bytes) -> bytes:
        return bytes([Tier.SSD]) if key in self._tier else b""

    def load(self, obj: StoredObject) -> bool:
        return self._tier.read(ReadRequest(obj.key, views_of(self._pool, obj), obj))

    def read(self, key: bytes, buffer: memoryview, on_read: Callable[[Loaded], None]) -> bool:
        """To memory outside of the pool. `on_read` is called by `poll`; False: not there."""
        return self._tier.read(ReadRequest(key, [buffer], on_read))

    def note_removal(self, keys: Sequence[bytes]) -> None:
        self._tier.note_removal()

    def remove(self, keys: Sequence[bytes]) -> None:
        if self._placements is not None:
            self._placements.removed([key for key in keys if key in self._tier], Tier.SSD)
        self.quotas.forget(keys)
        self._tier.remove(keys)

    def _make_room_in_quota(self, key: bytes, size_bytes: int) -> None:
        if leaving := self.quotas.add(key, size_bytes):
            self.remove(leaving)
            self._on_pushed_out(leaving)


def views_of(pool: memoryview, obj: StoredObject) -> list[memoryview]:
    """Its bytes, one behind the other."""
    extents = obj.extents
    return [pool[at : at + size] for at, size in zip(extents[::2], extents[1::2], strict=True)]


def given_checksums(obj: StoredObject) -> tuple[int, ...]:
    """One a layer, or none at all when its writer left some out; then all are computed on the way."""
    checksums = struct.unpack(f"<{len(obj.checksums) // 8}Q", obj.checksums)
    return () if len(checksums) != obj.num_layers or 0 in checksums else checksums
