from itertools import pairwise

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from store_server.ssd.aligned import Arena
from store_server.ssd.batch import batch_bytes, build_batch
from store_server.ssd.format import (
    PAGE_BYTES,
    PRELUDE_BYTES,
    SEGMENT_MAGIC,
    SNAPSHOT_MAGIC,
    FormatError,
    Prelude,
    decode_body,
    decode_prelude,
    encode_prelude,
    layer_bounds,
)
from store_server.ssd.types import WriteRequest

PRELUDE = Prelude(
    body_bytes=17, segment_id=3, offset_bytes=8192, sequence=99, length_bytes=65536, body_digest=5
)


def test_a_prelude_comes_back() -> None:
    assert decode_prelude(SEGMENT_MAGIC, encode_prelude(SEGMENT_MAGIC, PRELUDE)) == PRELUDE


@given(st.integers(0, PRELUDE_BYTES - 1), st.integers(1, 255))
def test_any_changed_byte_of_a_prelude_is_noticed(position: int, change: int) -> None:
    data = bytearray(encode_prelude(SEGMENT_MAGIC, PRELUDE))
    data[position] ^= change
    with pytest.raises(FormatError):
        decode_prelude(SEGMENT_MAGIC, bytes(data))


@pytest.mark.parametrize("data", [b"", bytes(PAGE_BYTES), encode_prelude(SNAPSHOT_MAGIC, PRELUDE)])
def test_what_is_no_segment_header_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        decode_prelude(SEGMENT_MAGIC, data)


def test_another_version_is_named() -> None:
    fixed = bytearray(encode_prelude(SEGMENT_MAGIC, PRELUDE)[:-8])
    fixed[8] = 2
    data = bytes(fixed) + xxhash.xxh3_64_intdigest(bytes(fixed)).to_bytes(8, "little")
    with pytest.raises(FormatError, match="version 2"):
        decode_prelude(SEGMENT_MAGIC, data)


@given(st.integers(0, 1 << 20), st.integers(1, 200))
def test_layers_cover_the_object_without_gap_or_overlap(size_bytes: int, num_layers: int) -> None:
    bounds = [layer_bounds(size_bytes, num_layers, layer) for layer in range(num_layers)]
    assert bounds[0][0] == 0 and bounds[-1][1] == size_bytes
    assert all(left[1] == right[0] for left, right in pairwise(bounds))


@given(
    st.lists(
        st.tuples(st.binary(min_size=1, max_size=40), st.binary(max_size=9000), st.integers(1, 7)), max_size=6
    ),
    st.lists(st.binary(min_size=1, max_size=40), max_size=5),
)
def test_a_batch_describes_itself(objects: list[tuple[bytes, bytes, int]], removed: list[bytes]) -> None:
    writes = [WriteRequest(key, [memoryview(data)], len(data), layers) for key, data, layers in objects]
    batch = build_batch(writes, removed, 4, 12288, 7, Arena(1 << 20))
    written = b"".join(batch.views)
    assert len(written) == batch.length_bytes == batch_bytes(writes, removed)
    assert len(written) % PAGE_BYTES == 0

    prelude = decode_prelude(SEGMENT_MAGIC, written)
    assert (prelude.segment_id, prelude.offset_bytes, prelude.sequence) == (4, 12288, 7)
    assert prelude.length_bytes == len(written)
    body = decode_body(prelude, written[PRELUDE_BYTES : PRELUDE_BYTES + prelude.body_bytes])
    assert body.removed == removed
    assert [record.key for record in body.records] == [key for key, _, _ in objects]
    for record, (_, data, layers) in zip(body.records, objects, strict=True):
        assert record.offset_bytes % PAGE_BYTES == 0
        assert written[record.offset_bytes : record.offset_bytes + record.size_bytes] == data
        assert record.checksums == [
            xxhash.xxh3_64_intdigest(data[slice(*layer_bounds(len(data), layers, layer))])
            for layer in range(layers)
        ]


def test_padding_holds_no_bytes_of_earlier_batches() -> None:
    arena = Arena(64 << 10)
    secret = WriteRequest(b"k", [memoryview(b"\xee" * 20000)], 20000)
    build_batch([secret], [], 1, 0, 1, arena)
    arena.reset()
    batch = build_batch([WriteRequest(b"k", [memoryview(b"a")], 1)], [], 1, 0, 2, arena)
    assert b"\xee" not in b"".join(batch.views)


def test_given_checksums_are_kept_and_not_computed_again() -> None:
    write = WriteRequest(b"k", [memoryview(b"abcd")], 4, 2, [11, 22])
    batch = build_batch([write], [], 1, 0, 1, Arena(8192))
    assert batch.body.records[0].checksums == [11, 22]
