"""Requests to the SSD tier and the outcomes it hands back."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvcore.wire.messages import Status


@dataclass(frozen=True, slots=True, eq=False)
class WriteRequest:
    """Write an object back. `buffers`: readable memoryviews of bytes whose concatenation is the object; they
    must not change until the `Written` outcome. `checksums`: xxh3-64 of each layer, or empty (then
    computed)."""

    key: bytes
    buffers: Sequence[memoryview]
    size_bytes: int
    num_layers: int = 1
    checksums: Sequence[int] = ()
    token: Any = None


@dataclass(frozen=True, slots=True, eq=False)
class ReadRequest:
    """Bring an object back. `buffers`: writable memoryviews of `size_bytes` in all; they belong to the tier
    until the `Loaded` outcome. Page-aligned buffers are read into directly, others through a copy."""

    key: bytes
    buffers: Sequence[memoryview]
    token: Any = None


class Location(NamedTuple):
    """Where an object lies. `offset_bytes` is that of its first payload byte in the segment file."""

    disk: int
    segment_id: int
    offset_bytes: int
    size_bytes: int
    num_layers: int


@dataclass(frozen=True, slots=True)
class Written:
    """OK: on disk, found again after a kill -9. FULL / UNAVAILABLE: no disk could take it. ABANDONED: it was
    removed meanwhile. In each case the request's buffers are the caller's again."""

    request: WriteRequest
    status: Status


@dataclass(frozen=True, slots=True)
class Loaded:
    """OK: the bytes are in the buffers and match `checksums` (one a layer). CORRUPT: checksum mismatch or a
    read error, the object is dropped. MISSING: reclaimed or removed meanwhile."""

    request: ReadRequest
    status: Status
    checksums: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Dropped:
    """These keys are no longer on SSD. `reason`: "reclaimed" | "corrupt" | "disk failed"."""

    keys: Sequence[bytes]
    reason: str


@dataclass(frozen=True, slots=True)
class Removed:
    """A removal is durable: a restart will not bring these keys back."""

    keys: Sequence[bytes]


Outcome = Written | Loaded | Dropped | Removed
