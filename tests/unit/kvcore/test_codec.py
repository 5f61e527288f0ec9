"""Framing: what goes in comes out, however it is cut; what is malformed is refused and never hurts."""

import random
import struct

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.errors import LocalProtocolError, RemoteProtocolError
from kvcore.wire import messages as m
from kvcore.wire.codec import (
    FRAME_HEADER,
    FRAME_HEADER_BYTES,
    SUM_BYTES,
    Frame,
    encode_frame,
    reply_decoder,
    request_decoder,
    sealed,
)
from kvcore.wire.receiver import FrameReceiver

KEYS = [bytes([number]) * 32 for number in range(4)]
REQUESTS = [
    m.Hello(1, 1, "client", ["shm", "tcp"], "token", "host"),
    m.Lookup(2, KEYS, True),
    m.Exists(3, KEYS),
    m.Put(4, KEYS[:1], [5], [2**64 - 1]),
    m.Reserve(5, KEYS, [1 << 40], 80),
    m.Write(6, KEYS, 3, 4, [1, 2, 3, 4]),
    m.Commit(7, KEYS, 0, 80),
    m.Abort(8, KEYS),
    m.Read(9, KEYS, 0, 0, 250),
    m.Await(10, KEYS, 1, 5),
    m.Acquire(11, KEYS, 5000, 2, 0),
    m.Renew(12, 77, 5000),
    m.Release(13, 77),
    m.Pin(14, KEYS, m.PinKind.HARD, 5),
    m.Unpin(15, KEYS),
    m.Remove(16, KEYS, True),
    m.Evict(17, 1 << 30, m.EvictStrategy.COPIES),
    m.ListKeys(18, 5, 10),
    m.Stats(19),
    m.Drain(20, True),
    m.Verify(21, True),
    m.Describe(22, KEYS),
    m.ChangeReplica(25, KEYS, m.Tier.REMOTE, True, 500),
    m.Resolve(26, [0, 2**64 - 1]),
    m.CopyFrom(27, [b"k"], "10.0.0.2:50051", [b"p"], 500),
    m.ConnectQueuePair(23, "mlx5_0", m.QueuePairAddress(2**24 - 1, 7, bytes(16), 0, 5)),
    m.DisconnectQueuePair(24, "mlx5_0", 5),
]
FUZZ_INPUTS = 120_000


def receiver_into(log: list[tuple[m.Message | None, bytes]], decoder) -> FrameReceiver:
    payloads: dict[int, bytearray] = {}

    def on_frame(frame: Frame) -> list[memoryview]:
        payload = payloads[frame.request_id] = bytearray(frame.payload_bytes)
        half = frame.payload_bytes // 2
        return [memoryview(payload)[:half], memoryview(payload)[half:]]

    def on_end(frame: Frame) -> None:
        log.append((frame.message, bytes(payloads.pop(frame.request_id))))

    return FrameReceiver(decoder, on_frame, on_end, staging_bytes=64)


def feed(receiver: FrameReceiver, data: bytes, cuts: random.Random) -> None:
    """As a socket would: any amount at a time, scattered over the views in order."""
    position = 0
    while position < len(data):
        size = taken = cuts.randint(1, 300)
        taken = 0
        for view in receiver.views():
            piece = data[position + taken : position + min(size, taken + len(view))]
            view[: len(piece)] = piece
            taken += len(piece)
        position += taken
        receiver.received(taken)


@pytest.mark.parametrize("request_message", REQUESTS, ids=lambda message: type(message).__name__)
def test_every_request_survives_the_wire(request_message):
    data = encode_frame(request_message, 5)
    body_bytes, payload_bytes = request_decoder().decode_header(data)
    assert (FRAME_HEADER_BYTES + body_bytes, payload_bytes) == (len(data), 5)
    frame = request_decoder().decode_body(data[FRAME_HEADER_BYTES:], payload_bytes)
    assert frame == Frame(request_message, request_message.id, 5)


def test_the_table_of_requests_is_complete():
    assert {type(message) for message in REQUESTS} == set(m.Request.__args__)


@given(
    st.lists(st.tuples(st.sampled_from(REQUESTS), st.binary(max_size=700)), max_size=12),
    st.randoms(use_true_random=False),
)
@settings(max_examples=150, deadline=None)
def test_frames_are_found_however_the_bytes_are_cut(parts, cuts):
    log: list[tuple[m.Message | None, bytes]] = []
    data = b"".join(encode_frame(message, len(payload)) + payload for message, payload in parts)
    receiver = receiver_into(log, request_decoder())
    feed(receiver, data, cuts)
    assert log == parts and not receiver.in_payload


@given(st.binary(min_size=1, max_size=3000), st.integers(0, 3000), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_payload_without_a_place_is_dropped(payload, kept, cuts):
    kept = min(kept, len(payload))
    place, ended = bytearray(kept), []
    receiver = FrameReceiver(
        reply_decoder(),
        lambda frame: [memoryview(place)] if frame.payload_bytes and kept else None,
        lambda frame: ended.append(frame.request_id),
        staging_bytes=64,
    )
    data = encode_frame(m.ReadReply(1, b"", []), len(payload)) + payload + encode_frame(m.Ack(2))
    feed(receiver, data, cuts)
    assert ended == [1, 2] and place == payload[:kept]


def test_memory_larger_than_the_payload_is_our_own_mistake():
    receiver = FrameReceiver(reply_decoder(), lambda frame: [memoryview(bytearray(9))], lambda frame: None)
    with pytest.raises(LocalProtocolError, match="9 bytes of memory given for 5"):
        feed(receiver, encode_frame(m.ReadReply(1, b"", []), 5) + b"12345", random.Random(0))


def test_a_header_does_not_make_us_allocate_what_it_promises():
    receiver = FrameReceiver(request_decoder(), lambda frame: None, lambda frame: None, staging_bytes=64)
    feed(receiver, FRAME_HEADER.pack(8 << 20, 1 << 30) + bytes(100), random.Random(0))
    assert sum(map(len, receiver.views())) < 1000


@pytest.mark.parametrize(
    ("header", "complaint"),
    [
        (FRAME_HEADER.pack(0, 0), "frame body of 0 bytes"),
        (FRAME_HEADER.pack(1001, 0), "frame body of 1001 bytes, allowed are 1 to 1000"),
        (FRAME_HEADER.pack(10, 2001), "payload of 2001 bytes, allowed are 2000"),
    ],
)
def test_limits_are_checked_on_the_header(header, complaint):
    decoder = request_decoder(max_body_bytes=1000, max_payload_bytes=2000)
    with pytest.raises(RemoteProtocolError, match=complaint):
        decoder.decode_header(header)


def test_unknown_messages_keep_their_id_and_unknown_fields_are_ignored():
    newer = sealed(msgspec.msgpack.encode([99, 7, "anything", {"of": ["a newer"]}, "version"]), 3)
    assert request_decoder().decode_body(newer, 3) == Frame(None, 7, 3)
    longer = sealed(msgspec.msgpack.encode([10, 7, KEYS, False, "a field added later", 5]), 0)
    assert request_decoder().decode_body(longer, 0).message == m.Lookup(7, KEYS)
    wrong_type = sealed(msgspec.msgpack.encode([10, 7, "not a list of keys"]), 0)
    assert request_decoder().decode_body(wrong_type, 0) == Frame(None, 7, 0)


@pytest.mark.parametrize(
    "body", [b"\xc1", b"\x93\x01", b"\x80", b"\x90", b"\x91\x0a", b"\x92\xa1a\x01", b"\x05"]
)
def test_bodies_that_are_no_message_are_refused(body):
    with pytest.raises(RemoteProtocolError, match="frame body is not"):
        request_decoder().decode_body(sealed(body, 0), 0)


@pytest.mark.parametrize("start", [b"", b"\x92\x63", b"\x93\x63\x01", b"\x93\x0a\x01"])
def test_deep_nesting_is_refused(start):
    with pytest.raises(RemoteProtocolError, match="frame body is not"):
        request_decoder().decode_body(sealed(start + b"\x91" * 100_000, 0), 0)


@pytest.mark.parametrize("request_message", REQUESTS, ids=lambda message: type(message).__name__)
def test_no_bit_of_a_frame_changes_unnoticed(request_message):
    """It would be another layer, another key, or the answer to another request: bytes whose sums match."""
    whole = encode_frame(request_message, 5) + b"12345"
    for bit in range(8 * (len(whole) - 5)):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        log: list[tuple[m.Message | None, bytes]] = []
        receiver = receiver_into(log, request_decoder())
        try:
            feed(receiver, bytes(data), random.Random(bit))
        except RemoteProtocolError:
            continue
        assert not log and not receiver.in_payload, f"bit {bit}"  # a longer body, which never comes


def test_bodies_without_room_for_a_checksum_are_refused():
    for size in range(1, 8):
        with pytest.raises(RemoteProtocolError, match="damaged"):
            request_decoder().decode_body(bytes(size), 0)


def mutate_inside(data: bytes, rng: random.Random) -> bytes:
    """A frame whose checksum is right and whose body may be anything."""
    payload_bytes = FRAME_HEADER.unpack_from(data)[1]
    body = mutate(data[FRAME_HEADER_BYTES:-SUM_BYTES], rng)
    return FRAME_HEADER.pack(len(body) + SUM_BYTES, payload_bytes) + sealed(body, payload_bytes)


def mutate(data: bytes, rng: random.Random) -> bytes:
    mutated = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        kind = rng.randrange(5)
        where = rng.randrange(len(mutated)) if mutated else 0
        if kind == 0 and mutated:
            mutated[where] = rng.randrange(256)
        elif kind == 1:
            del mutated[where:]
        elif kind == 2:
            mutated[where:where] = rng.randbytes(rng.randint(1, 20))
        elif kind == 3 and len(mutated) >= FRAME_HEADER_BYTES:
            struct.pack_into("<I", mutated, 0, rng.choice([0, 1, len(data), 1 << 24, 2**32 - 1]))
        elif len(mutated) >= FRAME_HEADER_BYTES:
            struct.pack_into("<Q", mutated, 4, rng.choice([0, 1, 1 << 31, 2**63, 2**64 - 1]))
    return bytes(mutated)


def test_fuzz_malformed_frames_are_refused_or_understood_never_anything_else():
    """120,000 mutated, truncated and random inputs, all the way through the receiver."""
    rng = random.Random(20260101)
    corpus = [encode_frame(message, payload) for message in REQUESTS for payload in (0, 9)]
    refused = understood = 0
    for number in range(FUZZ_INPUTS):
        data = rng.randbytes(rng.randint(0, 80))
        if number % 4:
            data = (mutate if number % 4 == 1 else mutate_inside)(rng.choice(corpus), rng)
        log: list[Frame] = []
        receiver = FrameReceiver(request_decoder(), lambda frame: None, log.append, staging_bytes=256)
        try:
            feed(receiver, data, rng)
        except RemoteProtocolError:
            refused += 1
        understood += any(frame.message is not None for frame in log)
    assert refused > FUZZ_INPUTS // 10 and understood > FUZZ_INPUTS // 100
