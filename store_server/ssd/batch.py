"""Building one write: the views that, written in order, are a batch of the format."""

from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from store_server.ssd.aligned import Arena, copy_bytes, is_direct, layer_checksums
from store_server.ssd.format import (
    PAGE_BYTES,
    PRELUDE_BYTES,
    SEGMENT_MAGIC,
    BatchBody,
    Prelude,
    Record,
    encode_body,
    encode_prelude,
    max_body_bytes,
    round_up,
)
from store_server.ssd.types import WriteRequest


@dataclass(frozen=True, slots=True)
class Batch:
    """`views` point into the requests' buffers and the arena; `body` is what the header says."""

    views: list[memoryview]
    length_bytes: int
    body: BatchBody


def header_bytes(writes: Sequence[WriteRequest], removed: Sequence[bytes]) -> int:
    keys_bytes = sum(len(write.key) for write in writes) + sum(len(key) for key in removed)
    num_checksums = sum(write.num_layers for write in writes)
    return round_up(PRELUDE_BYTES + max_body_bytes(keys_bytes, len(writes) + len(removed), num_checksums))


def batch_bytes(writes: Sequence[WriteRequest], removed: Sequence[bytes]) -> int:
    """The length of the batch, known before anything is read or written."""
    return header_bytes(writes, removed) + sum(round_up(write.size_bytes) for write in writes)


def build_batch(
    writes: Sequence[WriteRequest],
    removed: Sequence[bytes],
    segment_id: int,
    offset_bytes: int,
    sequence: int,
    arena: Arena,
) -> Batch:
    """Computes the checksums nobody gave us. Payloads on page boundaries are not copied."""
    head_bytes = header_bytes(writes, removed)
    head = arena.take(head_bytes)
    views, records, at = [head], [], head_bytes
    for write in writes:
        checksums = list(write.checksums) or layer_checksums(
            write.buffers, write.size_bytes, write.num_layers
        )
        records.append(Record(write.key, at, write.size_bytes, write.num_layers, checksums))
        views += _padded_views(write, arena)
        at += round_up(write.size_bytes)
    body = BatchBody(records, list(removed))
    encoded = encode_body(body)
    prelude = Prelude(len(encoded), segment_id, offset_bytes, sequence, at, xxhash.xxh3_64_intdigest(encoded))
    _fill_page_run(head, encode_prelude(SEGMENT_MAGIC, prelude) + encoded)
    return Batch(views, at, body)


def _padded_views(write: WriteRequest, arena: Arena) -> list[memoryview]:
    """The object's bytes, zero-padded to whole pages, in memory that O_DIRECT accepts."""
    if is_direct(write.buffers):
        views = list(write.buffers)
        tail_bytes = write.size_bytes % PAGE_BYTES
        if tail_bytes:
            last = views.pop()
            views.append(last[: len(last) - tail_bytes])
            tail = arena.take(PAGE_BYTES)
            _fill_page_run(tail, last[len(last) - tail_bytes :])
            views.append(tail)
        return views
    whole, at = arena.take(write.size_bytes), 0
    for view in write.buffers:
        copy_bytes(whole[at : at + len(view)], view)
        at += len(view)
    whole[at:] = bytes(len(whole) - at)
    return [whole]


def _fill_page_run(target: memoryview, content: bytes | memoryview) -> None:
    """Zeros after the content: scratch memory may still hold bytes of other objects."""
    target[: len(content)] = content
    target[len(content) :] = bytes(len(target) - len(content))
