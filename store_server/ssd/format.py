"""What lies on disk. Pure: bytes in, structures out.

A segment file `segment-<id>.kv` is a run of batches, each a multiple of 4 KiB and written by one system call:

    batch   = header | payload 0 | payload 1 | ...         header and every payload begin on a 4 KiB page
    header  = prelude (64 bytes, checksummed) | msgpack BatchBody (checksummed by the prelude), zero-padded
    prelude = magic, version, body length, segment id, offset, sequence, batch length, body xxh3, prelude xxh3

All headers of a batch stand together, so small objects pay no page of their own for it, and rebuilding the
index takes one small read for every ~4 MiB. Segment id and own offset in the prelude keep payload bytes that
happen to look like a header from being taken for one.

A sealed segment has a snapshot of its index beside it, `segment-<id>.index`: same prelude, then msgpack
BatchBody of the whole segment with offsets from its begin. It is only a shortcut: without a valid one the
headers are scanned.

Within a batch the removals come first, then the records. Later batches win over earlier ones.
"""

import struct

import msgspec
import xxhash

PAGE_BYTES = 4096
FORMAT_VERSION = 1
SEGMENT_MAGIC = b"MKVSSDB1"
SNAPSHOT_MAGIC = b"MKVSSDI1"

_PRELUDE = struct.Struct("<8sHHIQQQQQ")
_DIGEST = struct.Struct("<Q")
PRELUDE_BYTES = _PRELUDE.size + _DIGEST.size


def round_up(size_bytes: int, unit_bytes: int = PAGE_BYTES) -> int:
    return -(-size_bytes // unit_bytes) * unit_bytes


class Record(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One object. `offset_bytes`: of its payload, from the begin of the batch (in a snapshot: of the
    segment). `checksums`: xxh3-64 of each layer. `sequence`: of its batch, filled in for snapshots."""

    key: bytes
    offset_bytes: int
    size_bytes: int
    num_layers: int
    checksums: list[int]
    sequence: int = 0


class BatchBody(msgspec.Struct, frozen=True, array_like=True):
    records: list[Record]
    removed: list[bytes] = []


class Prelude(msgspec.Struct, frozen=True):
    """`length_bytes`: of the whole batch; in a snapshot: the used bytes of its segment."""

    body_bytes: int
    segment_id: int
    offset_bytes: int
    sequence: int
    length_bytes: int
    body_digest: int


class FormatError(Exception):
    """These bytes are not what we wrote."""


_encoder = msgspec.msgpack.Encoder()
_body_decoder = msgspec.msgpack.Decoder(BatchBody)


def encode_body(body: BatchBody) -> bytes:
    return _encoder.encode(body)


def max_body_bytes(num_keys_bytes: int, num_records: int, num_checksums: int) -> int:
    """An upper bound of encode_body's length, so that payload offsets can be chosen before the checksums."""
    return 32 + num_keys_bytes + 48 * num_records + 9 * num_checksums


def encode_prelude(magic: bytes, prelude: Prelude) -> bytes:
    fixed = _PRELUDE.pack(
        magic,
        FORMAT_VERSION,
        0,
        prelude.body_bytes,
        prelude.segment_id,
        prelude.offset_bytes,
        prelude.sequence,
        prelude.length_bytes,
        prelude.body_digest,
    )
    return fixed + _DIGEST.pack(xxhash.xxh3_64_intdigest(fixed))


def decode_prelude(magic: bytes, data: memoryview | bytes) -> Prelude:
    """Raises FormatError; a version we do not know is one, too (its segment is then never read, only
    reclaimed)."""
    if len(data) < PRELUDE_BYTES:
        raise FormatError("too short for a header")
    fixed = bytes(data[: _PRELUDE.size])
    found_magic, version, _, *numbers = _PRELUDE.unpack(fixed)
    if found_magic != magic:
        raise FormatError("no header here")
    (digest,) = _DIGEST.unpack_from(data, _PRELUDE.size)
    if digest != xxhash.xxh3_64_intdigest(fixed):
        raise FormatError("header checksum mismatch")
    if version != FORMAT_VERSION:
        raise FormatError(f"format version {version}, this program reads version {FORMAT_VERSION}")
    return Prelude(*numbers)


def decode_body(prelude: Prelude, data: memoryview | bytes) -> BatchBody:
    """`data`: exactly the body. Raises FormatError."""
    if len(data) != prelude.body_bytes or xxhash.xxh3_64_intdigest(data) != prelude.body_digest:
        raise FormatError("header body checksum mismatch")
    try:
        return _body_decoder.decode(data)
    except msgspec.DecodeError as error:
        raise FormatError(f"header body cannot be read: {error}") from error


def layer_bounds(size_bytes: int, num_layers: int, layer: int) -> tuple[int, int]:
    """[begin, end) of a layer in its object, as the wire protocol cuts objects."""
    return layer * size_bytes // num_layers, (layer + 1) * size_bytes // num_layers
