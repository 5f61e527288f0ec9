"""What a segment file holds, found again after a restart: from its index snapshot, or by scanning its
headers."""

import logging
import os
from dataclasses import dataclass

from store_server.ssd.aligned import Arena, layer_checksums
from store_server.ssd.disk_io import DiskIo, read_all
from store_server.ssd.folder import Folder, Place
from store_server.ssd.format import (
    PAGE_BYTES,
    PRELUDE_BYTES,
    SEGMENT_MAGIC,
    SNAPSHOT_MAGIC,
    BatchBody,
    FormatError,
    Prelude,
    decode_body,
    decode_prelude,
    round_up,
)
from store_server.ssd.segments import Contents

log = logging.getLogger(__name__)

_SEARCH_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Recovered:
    """`scanned`: there was no valid snapshot, and one should be written now."""

    contents: Contents
    file_bytes: int
    scanned: bool


def recover_segment(folder: Folder, segment_id: int, io: DiskIo, arena: Arena) -> Recovered:
    """Raises OSError when the disk does."""
    file_bytes = folder.size_bytes(segment_id)
    contents = _from_snapshot(folder, segment_id, file_bytes)
    if contents is not None:
        return Recovered(contents, file_bytes, scanned=False)
    place = folder.open(segment_id)
    try:
        return Recovered(_Scan(place, segment_id, file_bytes, io, arena).run(), file_bytes, scanned=True)
    finally:
        os.close(place.fd)


def _from_snapshot(folder: Folder, segment_id: int, file_bytes: int) -> Contents | None:
    try:
        data = folder.read_snapshot(segment_id)
        if data is None:
            return None
        prelude = decode_prelude(SNAPSHOT_MAGIC, data)
        body = decode_body(prelude, memoryview(data)[PRELUDE_BYTES:])
    except (OSError, FormatError) as error:
        log.warning("index of %s: %s; scanning the segment instead", folder.name(segment_id), error)
        return None
    if prelude.segment_id != segment_id or prelude.length_bytes != file_bytes:
        log.warning("the index of %s is not its own; scanning it instead", folder.name(segment_id))
        return None
    return Contents.of_snapshot(body, file_bytes, prelude.sequence)


class _Scan:
    """Walks from header to header. Where one is damaged, looks for the next: one bad page must not cost the
    rest."""

    def __init__(self, place: Place, segment_id: int, file_bytes: int, io: DiskIo, arena: Arena) -> None:
        self._place, self._segment_id, self._file_bytes = place, segment_id, file_bytes
        self._io, self._arena = io, arena

    def run(self) -> Contents:
        contents = Contents()
        at: int | None = 0
        last: tuple[BatchBody, int, int] | None = None
        while at is not None and at < self._file_bytes:
            found = self._header_at(at, contents.last_sequence)
            if found is None:
                at = self._search(at + PAGE_BYTES)
                continue
            prelude, body = found
            if last is not None:
                contents.apply(*last)
            last, at = (body, at, prelude.sequence), at + prelude.length_bytes
            contents.used_bytes, contents.last_sequence = at, prelude.sequence
        if last is not None:
            # Only the last batch can have been under way when the process died: its payload is not to be
            # trusted.
            body, begin, sequence = last
            contents.apply(self._whole_records(body, begin), begin, sequence)
        return contents

    def _header_at(self, at: int, after_sequence: int) -> tuple[Prelude, BatchBody] | None:
        self._arena.reset()
        page = self._read(at, PAGE_BYTES)
        try:
            prelude = decode_prelude(SEGMENT_MAGIC, page)
            if prelude.segment_id != self._segment_id or prelude.offset_bytes != at:
                raise FormatError("header of another place")
            if prelude.sequence <= after_sequence or at + prelude.length_bytes > self._file_bytes:
                raise FormatError("header of another time")
            end = PRELUDE_BYTES + prelude.body_bytes
            head = page if end <= len(page) else self._read(at, round_up(end))
            return prelude, decode_body(prelude, head[PRELUDE_BYTES:end])
        except FormatError:
            return None

    def _search(self, begin: int) -> int | None:
        """The first page from `begin` on that begins with the magic."""
        for chunk_at in range(begin, self._file_bytes, _SEARCH_BYTES):
            self._arena.reset()
            chunk = self._read(chunk_at, _SEARCH_BYTES)
            for offset in range(0, len(chunk), PAGE_BYTES):
                if chunk[offset : offset + len(SEGMENT_MAGIC)] == SEGMENT_MAGIC:
                    return chunk_at + offset
        return None

    def _whole_records(self, body: BatchBody, at: int) -> BatchBody:
        whole = []
        for record in body.records:
            self._arena.reset()
            payload = self._read(at + record.offset_bytes, round_up(record.size_bytes))[: record.size_bytes]
            if len(payload) < record.size_bytes:
                continue
            if layer_checksums([payload], record.size_bytes, record.num_layers) == record.checksums:
                whole.append(record)
        return BatchBody(whole, body.removed)

    def _read(self, at: int, size_bytes: int) -> memoryview:
        view = self._arena.take(size_bytes)
        read_bytes = read_all(self._io, self._place.fd, [view], self._place.base_bytes + at)
        # Behind a segment in a device lies something else.
        return view[: max(0, min(read_bytes, self._file_bytes - at))]
