"""The index of all disks after a restart."""

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from kvcore.errors import ConfigError
from store_server.ssd.disk import Disk
from store_server.ssd.generation import Generation
from store_server.ssd.index import Index
from store_server.ssd.segments import Contents
from store_server.ssd.types import Location

log = logging.getLogger(__name__)


@dataclass(slots=True)
class RebuildReport:
    num_objects: int = 0
    num_segments: int = 0
    num_segments_scanned: int = 0  # had no valid index snapshot
    last_sequence: int = 0
    elapsed_s: float = 0.0
    failed_paths: list[str] = field(default_factory=list)
    generation: Generation = field(default_factory=Generation)  # which begins with this start
    outdated: dict[int, list[bytes]] = field(default_factory=dict)
    """By disk, keys of which another has a later value: nobody would tell it when that one is removed."""


def rebuild_index(disks: Sequence[Disk], index: Index, *, for_service: bool) -> RebuildReport:
    """Open the disks and fill the index; a disk that cannot be opened is marked failed. Blocks. ConfigError
    when a path is in use by another store. `for_service`: this begins a new generation."""
    begin_s = time.monotonic()
    rebuild = _Rebuild(disks, index)
    with ThreadPoolExecutor(len(disks), thread_name_prefix="ssd-open") as pool:
        noted = list(pool.map(rebuild.claim_disk, disks))
        newest_removal = max(generation.last_removal for generation in noted)
        list(pool.map(rebuild.open_disk, disks, noted, [newest_removal] * len(disks)))
        newest = max(max(generation) for generation in noted)
        rebuild.report.generation = Generation(newest, newest_removal).next()
        if for_service:
            list(pool.map(lambda disk: disk.note_now(rebuild.report.generation), rebuild.working_disks()))
    rebuild.report.outdated = rebuild.outdated()
    rebuild.report.num_objects = len(index)
    rebuild.report.elapsed_s = time.monotonic() - begin_s
    return rebuild.report


class _Rebuild:
    def __init__(self, disks: Sequence[Disk], index: Index) -> None:
        self.report = RebuildReport()
        self._disks = disks
        self._index = index
        self._lock = threading.Lock()
        # A key can lie on two disks after one of them was out for a while; the later write is then the right
        # one.
        self._sequences: dict[bytes, int] | None = {} if len(disks) > 1 else None
        self._outdated: set[tuple[int, bytes]] = set()

    def claim_disk(self, disk: Disk) -> Generation:
        try:
            return disk.claim()
        except ConfigError:
            raise
        except OSError as error:
            self._leave_out(disk, error)
            return Generation()

    def open_disk(self, disk: Disk, noted: Generation, newest_removal: int) -> None:
        if disk.failed:
            return
        try:
            if noted.has_missed(newest_removal):
                num_segments = disk.discard_all()
                if num_segments:
                    log.warning(
                        "%s was out of service while objects were removed: what it held is dropped",
                        disk.directory,
                    )
                return
            disk.open(
                lambda segment_id, contents, scanned: self._add(disk.number, segment_id, contents, scanned)
            )
        except OSError as error:
            self._leave_out(disk, error)

    def working_disks(self) -> list[Disk]:
        return [disk for disk in self._disks if not disk.failed]

    def outdated(self) -> dict[int, list[bytes]]:
        """By disk, the keys that it holds and that were written to another one later."""
        found: dict[int, list[bytes]] = {}
        for disk, key in self._outdated:
            place = self._index.location(key)
            # Of a disk that has the right one as well, the order of its own segments tells.
            if place is None or place.disk != disk:
                found.setdefault(disk, []).append(key)
        return found

    def _leave_out(self, disk: Disk, error: OSError) -> None:
        log.error("%s is left out: %s", disk.directory, error)
        disk.failed = True
        with self._lock:
            self._index.remove_disk(disk.number)
            self.report.failed_paths.append(str(disk.directory))

    def _add(self, disk: int, segment_id: int, contents: Contents, scanned: bool) -> None:
        with self._lock:
            for key in contents.removed:
                place = self._index.location(key)
                if place is not None and place.disk == disk:
                    self._index.remove(key)
            for key, record in contents.records.items():
                if self._sequences is not None:
                    if self._sequences.get(key, 0) > record.sequence:
                        # Also if the later one has been removed since.
                        self._outdated.add((disk, key))
                        continue
                    self._sequences[key] = record.sequence
                    if (other := self._index.location(key)) is not None and other.disk != disk:
                        self._outdated.add((other.disk, key))
                place = Location(disk, segment_id, record.offset_bytes, record.size_bytes, record.num_layers)
                self._index.add(key, place, record.checksums)
            self.report.num_segments += 1
            self.report.num_segments_scanned += scanned
            self.report.last_sequence = max(self.report.last_sequence, contents.last_sequence)
