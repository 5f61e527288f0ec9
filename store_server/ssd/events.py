"""What disk threads tell the tier. The tier applies them to its index in the loop, in the order they
happened."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvcore.wire.messages import Status
from store_server.ssd.format import Record
from store_server.ssd.types import Location, ReadRequest, WriteRequest


@dataclass(frozen=True, slots=True)
class BatchWritten:
    """`records` have offsets from the begin of their segment, one for each of `writes`."""

    disk: int
    segment_id: int
    records: Sequence[Record]
    writes: Sequence[WriteRequest]
    removed: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class WritesRefused:
    disk: int
    writes: Sequence[WriteRequest]
    status: Status


@dataclass(frozen=True, slots=True)
class SegmentsDropped:
    disk: int
    segment_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class DiskFailed:
    disk: int


@dataclass(frozen=True, slots=True)
class ReadDone:
    request: ReadRequest
    location: Location
    status: Status
    checksums: Sequence[int]


@dataclass(frozen=True, slots=True)
class FoundCorrupt:
    """A check found that these objects cannot be read back."""

    found: Sequence[tuple[bytes, Location]]


Event = BatchWritten | WritesRefused | SegmentsDropped | DiskFailed | ReadDone | FoundCorrupt
