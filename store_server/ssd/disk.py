"""One path of the SSD tier: recovery, one writer thread, a few reader threads. What fails here stays here."""

import errno
import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from kvcore.errors import ConfigError
from kvcore.units import format_size
from kvcore.wire.messages import Status
from store_server.ssd.aligned import Arena, copy_bytes, is_direct, layer_checksums
from store_server.ssd.block_device import BlockDevice, is_block_device
from store_server.ssd.config import DiskConfig, SsdConfig
from store_server.ssd.disk_io import TRANSIENT_ERRNOS, DiskIo, read_all
from store_server.ssd.events import DiskFailed, Event, ReadDone
from store_server.ssd.folder import Directory, Folder
from store_server.ssd.format import PAGE_BYTES, round_up
from store_server.ssd.generation import Generation
from store_server.ssd.recovery import recover_segment
from store_server.ssd.segments import Contents, SegmentFiles
from store_server.ssd.types import Location, ReadRequest
from store_server.ssd.writer import Writer

log = logging.getLogger(__name__)

# One bad sector is an object lost; errors in a row are a disk lost.
READ_ERRORS_IN_A_ROW = 3
_KEEP_ARENA_BYTES = 4 << 20


class Disk:
    """`emit` is called from disk threads. All other methods are the loop's, except `read_object`."""

    def __init__(
        self,
        number: int,
        config: DiskConfig,
        tier_config: SsdConfig,
        io: DiskIo,
        next_sequence: Callable[[], int],
        emit: Callable[[Event], None],
    ) -> None:
        self.number = number
        self.directory = config.path
        self.capacity_bytes = config.capacity_bytes
        self.segment_bytes = config.effective_segment_bytes()
        self.failed = False
        self.written_bytes = 0
        self._io, self._emit = io, emit
        self._folder = _folder_at(config, self.segment_bytes, tier_config.batch_bytes, io)
        self._files = SegmentFiles(self._folder, config.capacity_bytes, self.segment_bytes, io)
        self._writer = Writer(number, self._files, tier_config, next_sequence, emit, self._fail)
        self._readers = ThreadPoolExecutor(
            tier_config.read_threads, thread_name_prefix=f"ssd-{number}-reader"
        )
        self._local = threading.local()
        self._failing = threading.Lock()
        self._errors_in_a_row = 0
        self._is_claimed = False
        self._noting = threading.Lock()
        self._noted = Generation()

    @property
    def max_object_bytes(self) -> int:
        return self._folder.max_object_bytes

    @property
    def used_bytes(self) -> int:
        return self._files.used_bytes

    @property
    def queued_bytes(self) -> int:
        return self._writer.queued_bytes

    @property
    def takes_writes(self) -> bool:
        return not self.failed and self._writer.takes_writes

    def claim(self) -> Generation:
        """What it notes. Blocks. ConfigError when the directory is in use, OSError when it is broken."""
        self._folder.lock()
        try:
            self._noted = self._folder.read_generation()
        except OSError:
            self._folder.unlock()
            raise
        self._is_claimed = True
        return self._noted

    def open(self, on_segment: Callable[[int, Contents, bool], None]) -> None:
        """Hand over what its segments hold, oldest first, with whether that took a scan. Blocks. OSError when
        the disk is broken."""
        try:
            for segment_id in self._folder.ids():
                self._open_segment(segment_id, on_segment)
            self._folder.clear_leftovers()
        except OSError:
            self._give_up()
            raise

    def discard_all(self) -> int:
        """Instead of `open`: nothing that it holds is wanted. How many segments that were."""
        try:
            segment_ids = self._folder.ids()
            for segment_id in segment_ids:
                self._files.adopt(segment_id, self._folder.size_bytes(segment_id))
                self._files.discard(segment_id)
            self._folder.clear_leftovers()
        except OSError:
            self._give_up()
            raise
        return len(segment_ids)

    def _give_up(self) -> None:
        self._is_claimed = False
        self._folder.unlock()

    def note(self, generation: Generation) -> None:
        """Has it written down, in a thread; what is older than what was noted last is not."""
        if self._is_claimed:
            self._readers.submit(self.note_now, generation)

    def note_now(self, generation: Generation) -> None:
        """Blocks. A disk that takes no note is not at fault for that: it will count as older than it is."""
        with self._noting:
            if not self._is_claimed:
                return  # perhaps another store's
            if generation.number and (self.failed or generation <= self._noted):
                return  # to one that has failed only that it is not to be trusted
            self._noted = generation
            try:
                self._folder.write_generation(generation)
            except OSError as error:
                log.warning("%s: not noted which generation it is of: %s", self.directory, error)

    def _open_segment(self, segment_id: int, on_segment: Callable[[int, Contents, bool], None]) -> None:
        recovered = recover_segment(self._folder, segment_id, self._io, self._arena())
        used_bytes = recovered.contents.used_bytes
        self._files.adopt(segment_id, recovered.file_bytes)
        if used_bytes == 0:
            log.info("%s holds nothing that can be read back; deleted", self._folder.name(segment_id))
            self._files.discard(segment_id)
            return
        if recovered.scanned:
            self._files.truncate(segment_id, used_bytes)
            self._files.write_snapshot(segment_id, recovered.contents)
        on_segment(segment_id, recovered.contents, recovered.scanned)

    def start(self) -> list[int]:
        """Start the threads; ids of the segments dropped because the cap is lower than before."""
        dropped = self._files.reclaim_to(self.capacity_bytes)
        self._writer.start()
        return dropped

    def stop_writing(self) -> bool:
        """Write back what waits, and seal. Blocks. False when not all removals could be written."""
        self._writer.stop()
        return not self._writer.has_lost_removals

    def close(self) -> None:
        """After `stop_writing`: end the other threads. Blocks."""
        self._is_claimed = False
        self._readers.shutdown(wait=True)
        self._folder.unlock()

    @property
    def writer(self) -> Writer:
        return self._writer

    def submit_read(self, request: ReadRequest, location: Location, checksums: Sequence[int]) -> None:
        self._readers.submit(self._read, request, location, checksums)

    def _read(self, request: ReadRequest, location: Location, checksums: Sequence[int]) -> None:
        status = self.read_object(location, checksums, request.buffers)
        self._emit(ReadDone(request, location, status, checksums))

    def read_object(
        self, location: Location, checksums: Sequence[int], buffers: Sequence[memoryview]
    ) -> Status:
        """Read and verify. Blocks; any thread. OK | MISSING | CORRUPT | UNAVAILABLE (nothing wrong with the
        object, ask again later)."""
        if self.failed:
            return Status.MISSING
        try:
            complete = self._read_payload(location, buffers)
        except FileNotFoundError:
            return Status.MISSING
        except OSError as error:
            return self._read_error(location, error)
        self._errors_in_a_row = 0
        if complete and layer_checksums(buffers, location.size_bytes, location.num_layers) == list(checksums):
            return Status.OK
        name = self._folder.name(location.segment_id)
        log.error("%s: bad checksum at %d", name, location.offset_bytes)
        return Status.CORRUPT

    def _read_payload(self, location: Location, buffers: Sequence[memoryview]) -> bool:
        """False when the file ends too early."""
        arena = self._arena()
        arena.reset()
        padded_bytes = round_up(location.size_bytes)
        direct = is_direct(buffers)
        if direct:
            views, tail_bytes = list(buffers), location.size_bytes % PAGE_BYTES
            if tail_bytes:
                last = views.pop()
                tail = arena.take(PAGE_BYTES)
                views += [last[: len(last) - tail_bytes], tail]
        else:
            views = [arena.take(padded_bytes)]
        place = self._folder.open(location.segment_id)
        try:
            read_bytes = read_all(self._io, place.fd, views, place.base_bytes + location.offset_bytes)
        finally:
            os.close(place.fd)
        if read_bytes < padded_bytes:
            return False
        if not direct:
            at = 0
            for buffer in buffers:
                copy_bytes(buffer, views[0][at : at + len(buffer)])
                at += len(buffer)
        elif tail_bytes:
            copy_bytes(buffers[-1][len(buffers[-1]) - tail_bytes :], tail[:tail_bytes])
        return True

    def _read_error(self, location: Location, error: OSError) -> Status:
        if error.errno in TRANSIENT_ERRNOS:
            log.warning("%s: %s", self.directory, error)
            return Status.UNAVAILABLE
        log.error("%s: read error: %s", self._folder.name(location.segment_id), error)
        self._errors_in_a_row += 1
        if self._errors_in_a_row >= READ_ERRORS_IN_A_ROW or error.errno not in (errno.EIO, errno.ENODATA):
            self._fail(error)
        return Status.CORRUPT

    def _fail(self, error: OSError) -> None:
        with self._failing:
            if self.failed:
                return
            self.failed = True
        log.error("%s is taken out of service until the next start: %s", self.directory, error)
        self._writer.fail()
        self._emit(DiskFailed(self.number))

    def _arena(self) -> Arena:
        if not hasattr(self._local, "arena"):
            self._local.arena = Arena(_KEEP_ARENA_BYTES)
        arena: Arena = self._local.arena
        return arena


def _folder_at(config: DiskConfig, segment_bytes: int, batch_bytes: int, io: DiskIo) -> Folder:
    if not is_block_device(config.path):
        return Directory(config.path, config.capacity_bytes, io)
    device = BlockDevice(config.path, config.capacity_bytes, segment_bytes, io)
    if device.max_object_bytes < batch_bytes:
        raise ConfigError(
            f"{config.path}: its segments of {format_size(segment_bytes)} are too small for a device; "
            f"give it a capacity of {format_size(32 * batch_bytes)} or more"
        )
    return device
