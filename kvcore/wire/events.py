"""KV cache events: every shape engines publish, decoded into one, and encoded for our store's own publisher.

Transport (ZMQ PUB): three frames [topic, seq u64 big-endian, msgpack payload]. The payload is an array
[ts, events, dp_rank?]; vLLM leaves a None rank out, SGLang writes nil. Events come in two encodings:
- map: {"type": "BlockStored", ...}: vLLM since PR 42892 (0.25), SGLang 0.5.23;
- array: ["BlockStored", hashes, parent, token_ids, block_size, lora_id, medium?, lora_name?, ...]: older
  vLLM, and older SGLang, whose 0.5.18 may put a map of metadata where lora_name stands.
Block hashes are u64 (vLLM: the low 64 bits of its digest), i64 (SGLang: the first 8 bytes of its digest) or
bytes (vLLM with VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0); all become u64 here, equal for equal blocks of one
engine family. One bad event is skipped and counted, the rest of its batch is kept.

Replay (DEALER to ROUTER): send [b"", first seq]; each answer is [b"", topic, seq, payload], the last one has
seq -1. Older engines leave the topic frame out.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from kvcore.errors import RemoteProtocolError

_U64 = (1 << 64) - 1
_REPLAY_END = b"\xff" * 8


class Medium(enum.IntEnum):
    """Where a block lies, fastest first."""

    GPU = 0
    CPU = 1
    DISK = 2
    EXTERNAL = 3


MEDIUM_NAMES = {
    None: Medium.GPU,  # engines older than the field had nothing else
    "GPU": Medium.GPU,
    "CPU": Medium.CPU,
    "CPU_PINNED": Medium.CPU,
    "DISK": Medium.DISK,
    "STORAGE": Medium.DISK,
    "EXTERNAL": Medium.EXTERNAL,
}


class BlockStored(msgspec.Struct, frozen=True, gc=False):
    """Blocks that have become available, a chain: each is the parent of the next.

    `token_ids` is empty when the publisher knows hashes only (tiers below the GPU); else it holds
    `block_size` tokens for each block, of which the last may be partial. `cache_salt` is known for SGLang
    only; vLLM puts it, untagged, among the first block's `extra_keys`. `namespace`: hex digits of the first
    half of the blocks' keys, which our store alone says; blocks of different models may have equal hashes.
    """

    block_hashes: Sequence[int]
    parent_block_hash: int | None
    token_ids: Sequence[int]
    block_size: int
    medium: Medium = Medium.GPU
    lora_name: str = ""
    cache_salt: str = ""
    extra_keys: Sequence[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    namespace: str = ""


class BlockRemoved(msgspec.Struct, frozen=True, gc=False):
    block_hashes: Sequence[int]
    medium: Medium = Medium.GPU
    group_idx: int | None = None
    namespace: str = ""


class AllBlocksCleared(msgspec.Struct, frozen=True, gc=False):
    pass


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, frozen=True, gc=False):
    """`ts` is the publisher's wall clock in seconds; `num_skipped` events could not be understood."""

    ts: float
    events: Sequence[Event]
    dp_rank: int | None = None
    num_skipped: int = 0


class Published(NamedTuple):
    """One message of a publisher or of its replay; `seq` None ends a replay."""

    seq: int | None
    payload: bytes


# ---- the current encoding, decoded in one go ------------------------------------------------------------


class _Stored(msgspec.Struct, tag="BlockStored", gc=False):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    medium: str | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    locality: str | None = None
    namespace: str | None = None


class _Removed(msgspec.Struct, tag="BlockRemoved", gc=False):
    block_hashes: list[int | bytes]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None
    namespace: str | None = None


class _Cleared(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    pass


class _MapBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[_Stored | _Removed | _Cleared]
    dp_rank: int | None = None


class _AnyBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[Any]
    dp_rank: int | None = None


_map_decoder = msgspec.msgpack.Decoder(_MapBatch)
_any_decoder = msgspec.msgpack.Decoder(_AnyBatch)
_encoder = msgspec.msgpack.Encoder()

_POSITIONS = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}


def block_hash_u64(block_hash: int | bytes) -> int:
    """The one form hashes are compared in.

    Bytes are cut to their low 64 bits, as vLLM does when it publishes ints. Anything else is a ValueError.
    """
    if isinstance(block_hash, int):
        return block_hash & _U64
    if len(block_hash) < 8:
        raise ValueError(f"a block hash has at least 8 bytes, not {len(block_hash)}")
    return int.from_bytes(block_hash[-8:], "big")


def decode_batch(payload: bytes | memoryview) -> EventBatch:
    """RemoteProtocolError when the payload is no batch at all; bad events in a batch are only counted."""
    try:
        batch = _map_decoder.decode(payload)
    except (msgspec.DecodeError, RecursionError):
        return _decode_any(payload)
    events: list[Event] = []
    num_skipped = 0
    for event in batch.events:
        try:
            events.append(_normalise(event))
        except (ValueError, TypeError, KeyError):
            num_skipped += 1
    return EventBatch(batch.ts, events, batch.dp_rank, num_skipped)


def _decode_any(payload: bytes | memoryview) -> EventBatch:
    try:
        batch = _any_decoder.decode(payload)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"not a batch of KV events: {error}") from error
    events: list[Event] = []
    num_skipped = 0
    for raw in batch.events:
        try:
            named = _named(raw)
            named["token_ids"] = _first_of_pairs(named.get("token_ids", []))
            events.append(_normalise(msgspec.convert(named, _Stored | _Removed | _Cleared)))
        except (msgspec.ValidationError, ValueError, TypeError, KeyError, IndexError):
            num_skipped += 1
    return EventBatch(batch.ts, events, batch.dp_rank, num_skipped)


def _named(raw: Any) -> dict[str, Any]:
    if isinstance(raw, dict):
        return dict(raw)
    named: dict[str, Any] = {"type": raw[0]}
    for name, value in zip(_POSITIONS[raw[0]], raw[1:], strict=False):
        if name == "lora_name" and isinstance(value, dict):
            named.update(value)
        else:
            named[name] = value
    return named


def _first_of_pairs(token_ids: list[Any]) -> list[Any]:
    # SGLang with EAGLE keys its pages by bigrams (t[i], t[i+1]): the first tokens are the page itself.
    if token_ids and isinstance(token_ids[0], list):
        return [pair[0] for pair in token_ids]
    return token_ids


def _normalise(event: _Stored | _Removed | _Cleared) -> Event:
    if type(event) is _Stored:
        parent = event.parent_block_hash
        return BlockStored(
            _hashes_u64(event.block_hashes),
            None if parent is None else block_hash_u64(parent),
            event.token_ids,
            event.block_size,
            _medium(event.medium, event.locality),
            event.lora_name or "",
            event.cache_salt or "",
            event.extra_keys,
            event.group_idx,
            event.kv_cache_spec_kind,
            event.namespace or "",
        )
    if type(event) is _Removed:
        return BlockRemoved(
            _hashes_u64(event.block_hashes),
            _medium(event.medium, event.locality),
            event.group_idx,
            event.namespace or "",
        )
    return AllBlocksCleared()


def _hashes_u64(hashes: list[int | bytes]) -> Sequence[int]:
    try:
        if not hashes or min(hashes) >= 0:  # type: ignore[operator]
            return hashes  # type: ignore[return-value]
    except TypeError:
        pass
    return [block_hash_u64(block_hash) for block_hash in hashes]


def _medium(name: str | None, locality: str | None) -> Medium:
    # vLLM's secondary tiers say STORAGE for a local disk and for a remote store alike; locality tells.
    if locality == "REMOTE":
        return Medium.EXTERNAL
    return MEDIUM_NAMES[name]


# ---- the other direction: what our store publishes --------------------------------------------------------


class HashForm(str, enum.Enum):
    """How an engine family names a block in its events: by eight bytes of its digest."""

    VLLM = "vllm"  # the last eight, unsigned
    SGLANG = "sglang"  # the first eight, signed


def block_hash_of_key(key: bytes, form: HashForm) -> int:
    """The name that engines of this family give, in their events, to the block stored under `key` (see
    kvcore.keys.block_key). Whatever stands before the last 16 bytes of the key plays no part."""
    if form is HashForm.VLLM:
        return int.from_bytes(key[-8:], "big")
    return int.from_bytes(key[-16:-8], "big", signed=True)


def encode_batch(ts: float, events: Sequence[Event], dp_rank: int | None = None) -> bytes:
    """The current (map) encoding, as vLLM 0.32 and SGLang 0.5.23 write it."""
    return _encoder.encode([ts, [_encodable(event) for event in events], dp_rank])


def _encodable(event: Event) -> dict[str, Any]:
    named: dict[str, Any] = {"type": type(event).__name__}
    for name in event.__struct_fields__:
        value = getattr(event, name)
        named[name] = value.name if isinstance(value, Medium) else value
    return named


# ---- frames -----------------------------------------------------------------------------------------------


def encode_seq(seq: int) -> bytes:
    return seq.to_bytes(8, "big")


def parse_published(frames: Sequence[bytes]) -> Published:
    """A message of the PUB socket. RemoteProtocolError when it is not [topic, seq, payload]."""
    if len(frames) != 3 or len(frames[1]) != 8:
        raise RemoteProtocolError(f"not a KV event message: frames of {[len(f) for f in frames]} bytes")
    return Published(int.from_bytes(frames[1], "big"), frames[2])


def replay_request(first_seq: int) -> list[bytes]:
    """Frames to send on a DEALER socket (a REQ socket could read only the first of many answers)."""
    return [b"", encode_seq(first_seq)]


def published_frames(topic: str, seq: int, payload: bytes) -> list[bytes]:
    """What a publisher sends on its PUB socket."""
    return [topic.encode(), encode_seq(seq), payload]


def parse_replay_request(frames: Sequence[bytes]) -> tuple[bytes, int]:
    """(peer, first seq) of a request that arrived on a ROUTER socket, from a DEALER or a REQ socket.
    RemoteProtocolError when it is none."""
    if len(frames) != 3 or frames[1] != b"" or len(frames[2]) != 8:
        raise RemoteProtocolError(f"not a request for a replay: frames of {[len(f) for f in frames]} bytes")
    return frames[0], int.from_bytes(frames[2], "big")


def replayed_frames(peer: bytes, topic: str, seq: int, payload: bytes) -> list[bytes]:
    """One answer on the ROUTER socket."""
    return [peer, b"", topic.encode(), encode_seq(seq), payload]


def replay_end_frames(peer: bytes) -> list[bytes]:
    return [peer, b"", b"", _REPLAY_END, b""]


def parse_replayed(frames: Sequence[bytes]) -> Published:
    """One answer to `replay_request`, with or without the topic frame."""
    if len(frames) not in (3, 4) or frames[0] != b"" or len(frames[-2]) != 8:
        raise RemoteProtocolError(f"not a KV event replay: frames of {[len(f) for f in frames]} bytes")
    if frames[-2] == _REPLAY_END:
        return Published(None, b"")
    return Published(int.from_bytes(frames[-2], "big"), frames[-1])
