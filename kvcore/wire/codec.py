"""Framing, sans-IO: bytes in, frames out.

A frame is [u32 body length | u64 payload length], little endian, the msgpack body, which ends with a checksum
of itself, then the payload. (A bit that changed in a body would ask for another layer or be the answer to
another request: bytes whose own checksums match.) The payload is never touched here: a reader takes the body,
then lets the shell move `payload_bytes` bytes straight from the socket to where they belong, then goes on
with the next frame. Since its length stands in the frame, even the payload of a message nobody understands
can be skipped without losing step.
"""

import struct
from typing import Generic, TypeVar

import msgspec
import xxhash

from kvcore.errors import RemoteProtocolError
from kvcore.wire.messages import Message, Reply, Request

FRAME_HEADER = struct.Struct("<IQ")
FRAME_HEADER_BYTES = FRAME_HEADER.size
SUM_BYTES = 8
DEFAULT_MAX_BODY_BYTES = 8 << 20
DEFAULT_MAX_PAYLOAD_BYTES = 1 << 30

_encoder = msgspec.msgpack.Encoder()
_tag_decoder = msgspec.msgpack.Decoder(list[msgspec.Raw])
T = TypeVar("T")


def sealed(body: bytes, payload_bytes: int) -> bytes:
    """`body` with the checksum that ends it: xxh3-64, big endian, seeded with the length of the payload."""
    return body + xxhash.xxh3_64_digest(body, payload_bytes)


def encode_frame(message: Message, payload_bytes: int = 0) -> bytes:
    """Header and body as one bytes object, so that a small message is one write."""
    body = sealed(_encoder.encode(message), payload_bytes)
    return FRAME_HEADER.pack(len(body), payload_bytes) + body


class Frame(msgspec.Struct, Generic[T], gc=False):
    """`message` is None when the body is well-formed but of an unknown type; `request_id` is then its id."""

    message: T | None
    request_id: int
    payload_bytes: int


class FrameDecoder(Generic[T]):
    """Decodes bodies of one direction and refuses what is over the limits, before anything is allocated."""

    def __init__(
        self,
        direction: type[T],
        max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
        max_payload_bytes: int = DEFAULT_MAX_PAYLOAD_BYTES,
    ) -> None:
        self._decoder = msgspec.msgpack.Decoder(direction)
        self.max_body_bytes = max_body_bytes
        self.max_payload_bytes = max_payload_bytes

    def decode_header(self, buffer: bytes | bytearray | memoryview, offset: int = 0) -> tuple[int, int]:
        """(body bytes, payload bytes) of the frame at `offset`; RemoteProtocolError when over the limits."""
        body_bytes, payload_bytes = FRAME_HEADER.unpack_from(buffer, offset)
        if not 0 < body_bytes <= self.max_body_bytes:
            raise RemoteProtocolError(
                f"frame body of {body_bytes} bytes, allowed are 1 to {self.max_body_bytes}"
            )
        if payload_bytes > self.max_payload_bytes:
            raise RemoteProtocolError(
                f"payload of {payload_bytes} bytes, allowed are {self.max_payload_bytes}"
            )
        return body_bytes, payload_bytes

    def decode_body(self, body: bytes | bytearray | memoryview, payload_bytes: int) -> Frame[T]:
        """RemoteProtocolError when the body is damaged or cannot be parsed; the connection is then of no more
        use."""
        body, digest = body[:-SUM_BYTES], body[-SUM_BYTES:]
        if digest != xxhash.xxh3_64_digest(body, payload_bytes):
            raise RemoteProtocolError("frame body is damaged: its checksum does not match")
        try:
            message = self._decoder.decode(body)
        except msgspec.ValidationError as error:
            return Frame(None, self._unknown_id(body, error), payload_bytes)
        except (msgspec.DecodeError, RecursionError) as error:
            raise RemoteProtocolError(f"frame body is not msgpack: {error}") from error
        return Frame(message, message.id, payload_bytes)  # type: ignore[attr-defined]

    @staticmethod
    def _unknown_id(body: bytes | bytearray | memoryview, error: Exception) -> int:
        # A message of a newer peer still begins [tag, id]; that much is enough to answer "unknown".
        try:
            tag_and_id = _tag_decoder.decode(body)[:2]
            tag, request_id = (msgspec.msgpack.decode(item, type=int) for item in tag_and_id)
        except (msgspec.MsgspecError, ValueError, RecursionError) as inner:
            raise RemoteProtocolError(f"frame body is not a message: {error}") from inner
        del tag
        return request_id


def request_decoder(
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES, max_payload_bytes: int = DEFAULT_MAX_PAYLOAD_BYTES
) -> FrameDecoder[Request]:
    return FrameDecoder(Request, max_body_bytes, max_payload_bytes)  # type: ignore[arg-type]


def reply_decoder(
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES, max_payload_bytes: int = DEFAULT_MAX_PAYLOAD_BYTES
) -> FrameDecoder[Reply]:
    return FrameDecoder(Reply, max_body_bytes, max_payload_bytes)  # type: ignore[arg-type]
