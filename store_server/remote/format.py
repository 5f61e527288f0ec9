"""One object on the remote: its name, which tells everything a listing has to, and its bytes.

    name    LAST TWO DIGITS OF THE KEY / THE KEY IN HEX . LAYERS . BYTES
    bytes   magic, xxh3-64 of the rest of the header, bytes of the key, layers, bytes of the payload;
            the key; xxh3-64 of each layer; the payload

Pure. What was read from a remote is trusted with nothing: everything is checked.
"""

import struct
from collections.abc import Sequence

import xxhash

from kvcore.transport.checksums import differs, layer_checksums
from kvcore.wire.messages import Tier
from store_server.core.tiering import ColdObject
from store_server.ssd.aligned import copy_bytes

MAGIC = b"MKVREMO1"
_HEAD = struct.Struct("<8sQHIQ")
_SUM_END = 16  # of magic and checksum, which the checksum does not cover
_WRONG_SIZE = "not an object of this key's size"
_SEGMENT_DIGITS = 200  # file names may have 255 bytes, keys 255 of their own


class CorruptObject(Exception):
    """What was read is not what was written."""


def name_of(key: bytes, num_layers: int, size_bytes: int) -> str:
    digits = key.hex()
    segments = [digits[at : at + _SEGMENT_DIGITS] for at in range(0, len(digits), _SEGMENT_DIGITS)]
    return f"{digits[-2:]}/{'/'.join(segments)}.{num_layers}.{size_bytes}"


def parse_name(name: str) -> tuple[bytes, ColdObject] | None:
    """None for what is not ours."""
    parts = name.partition("/")[2].replace("/", "").split(".")
    try:
        digits, num_layers, size_bytes = parts[0], int(parts[1]), int(parts[2])
        key = bytes.fromhex(digits)
    except (ValueError, IndexError):
        return None
    if len(parts) != 3 or not key or num_layers < 1 or size_bytes < 1:
        return None
    return key, ColdObject(size_bytes, num_layers, Tier.REMOTE)


def encode(key: bytes, num_layers: int, views: Sequence[memoryview], checksums: Sequence[int]) -> bytes:
    """Header and payload in one piece: a copy, so that nothing outside holds on to the store's memory.
    Without `checksums` they are computed."""
    sums = checksums or layer_checksums(views, num_layers)
    size_bytes = sum(map(len, views))
    rest = _HEAD.pack(b"", 0, len(key), num_layers, size_bytes)[_SUM_END:] + key
    rest += struct.pack(f"<{num_layers}Q", *sums)
    return b"".join([MAGIC, xxhash.xxh3_64_intdigest(rest).to_bytes(8, "little"), rest, *views])


def decode_into(data: memoryview, key: bytes, views: Sequence[memoryview]) -> list[int]:
    """Copies the payload to `views` and returns the checksum of each layer. CorruptObject when anything is
    not as it was written; the views may hold anything then."""
    payload, sums = _parse(data, key)
    if len(payload) != sum(map(len, views)):
        raise CorruptObject(_WRONG_SIZE)
    position = 0
    for view in views:
        copy_bytes(view, payload[position : position + len(view)])
        position += len(view)
    # Of what has been copied: the memory of the answer could change as well.
    _compare(sums, views)
    return sums


def check(data: memoryview, key: bytes) -> None:
    """CorruptObject when anything is not as it was written."""
    payload, sums = _parse(data, key)
    _compare(sums, [payload])


def _parse(data: memoryview, key: bytes) -> tuple[memoryview, list[int]]:
    """The payload, not yet compared with the checksums of its layers."""
    if len(data) < _HEAD.size:
        raise CorruptObject(f"{len(data)} bytes are no object")
    magic, head_sum, key_bytes, num_layers, size_bytes = _HEAD.unpack_from(data)
    payload_at = _HEAD.size + key_bytes + 8 * num_layers
    if magic != MAGIC or payload_at + size_bytes != len(data):
        raise CorruptObject(_WRONG_SIZE)
    if xxhash.xxh3_64_intdigest(data[_SUM_END:payload_at]) != head_sum:
        raise CorruptObject("its header has changed")
    if data[_HEAD.size : _HEAD.size + key_bytes] != key:
        raise CorruptObject("an object of another key")
    return data[payload_at:], list(struct.unpack_from(f"<{num_layers}Q", data, _HEAD.size + key_bytes))


def _compare(sums: Sequence[int], views: Sequence[memoryview]) -> None:
    if differs(sums, layer_checksums(views, len(sums))):
        raise CorruptObject("its payload has changed")
