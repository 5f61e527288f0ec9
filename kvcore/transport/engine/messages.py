"""What engines say to each other, over one TCP connection a peer: descriptions, handshakes of queue pairs,
and, where there is no RDMA, the bytes themselves.

A frame is [u32 body length | u64 payload length], little endian, a msgpack body, then the payload. Requests
are answered in their order.
"""

import contextlib
import socket
import struct
from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec

from kvcore.client.address import tune_socket
from kvcore.errors import DeadlineExceeded, RemoteProtocolError, StoreUnavailable
from kvcore.transport.verbs import QueuePairAddress

MAX_BODY_BYTES = 16 << 20
_HEADER = struct.Struct("<IQ")
T = TypeVar("T")


class RemoteKey(msgspec.Struct, frozen=True, array_like=True):
    """What it takes to reach memory through one card: its key, and where the memory begins in that card's
    eyes (0 for some memory of GPUs)."""

    key: int
    base: int


class RemoteMemory(msgspec.Struct, frozen=True, array_like=True):
    """`address` is the peer's own; `place` as in topology.py; `keys` by card. `is_host`: the peer's CPU
    reaches it."""

    address: int
    size_bytes: int
    place: str
    is_host: bool
    keys: dict[str, RemoteKey]

    def covers(self, address: int, size_bytes: int) -> bool:
        return self.address <= address and address + size_bytes <= self.address + self.size_bytes


class Greet(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """First on every connection."""

    token: str


class Describe(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


class Description(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """`matrix` as in topology.py; empty without RDMA. `takes_tcp`: whether bytes may come over TCP as
    well."""

    memories: list[RemoteMemory]
    matrix: dict[str, tuple[tuple[str, ...], tuple[str, ...]]]
    takes_tcp: bool


class Connect(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A queue pair for `card` of the peer. It lives as long as this connection, or until Retire."""

    card: str
    address: QueuePairAddress


class Connected(msgspec.Struct, frozen=True, tag=True, array_like=True):
    address: QueuePairAddress


class Retire(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answered when the queue pair is destroyed: what was sent over it cannot arrive any more."""

    number: int


class WriteTo(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The payload, of `size_bytes`, goes to `address`."""

    address: int
    size_bytes: int


class ReadFrom(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer carries the payload."""

    address: int
    size_bytes: int


class Done(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


class Refused(msgspec.Struct, frozen=True, tag=True, array_like=True):
    reason: str


Request = Greet | Describe | Connect | Retire | WriteTo | ReadFrom
Reply = Description | Connected | Done | Refused
REQUESTS = msgspec.msgpack.Decoder(Request)
REPLIES = msgspec.msgpack.Decoder(Reply)
_encode = msgspec.msgpack.Encoder().encode

# Where a payload goes that comes with this message; None drops it.
Place = Callable[[T], memoryview | None]


class Link:
    """A connected blocking socket. One thread sends, one receives (they may be the same). StoreUnavailable
    when the connection ends, DeadlineExceeded when its time-out passes, RemoteProtocolError for bytes that
    make no sense."""

    def __init__(self, sock: socket.socket) -> None:
        tune_socket(sock)
        self._sock = sock

    @classmethod
    def connect(cls, host: str, port: int, timeout_s: float) -> "Link":
        try:
            return cls(socket.create_connection((host, port), timeout_s))
        except OSError as error:
            raise StoreUnavailable(f"no engine at {host}:{port}: {error}") from error

    def send(self, message: Request | Reply, payload: memoryview | None = None) -> None:
        body = _encode(message)
        payload_bytes = 0 if payload is None else payload.nbytes
        with _mapped_errors():
            self._sock.sendall(_HEADER.pack(len(body), payload_bytes) + body)
            if payload is not None:
                self._sock.sendall(payload)

    def receive(self, decoder: "msgspec.msgpack.Decoder[T]", place: Place[T] | None = None) -> tuple[T, int]:
        """The next message, and how many bytes of payload it had. They are in their `place` by then."""
        head = self._exactly(_HEADER.size)
        body_bytes, payload_bytes = _HEADER.unpack(head)
        if not 0 < body_bytes <= MAX_BODY_BYTES:
            raise RemoteProtocolError(f"a message of {body_bytes} bytes, allowed are 1 to {MAX_BODY_BYTES}")
        try:
            message = decoder.decode(self._exactly(body_bytes))
        except msgspec.MsgspecError as error:
            raise RemoteProtocolError(f"a message that cannot be understood: {error}") from error
        if payload_bytes:
            view = place(message) if place is not None else None
            if view is not None and view.nbytes != payload_bytes:
                raise RemoteProtocolError(f"{payload_bytes} bytes came where {view.nbytes} belong")
            self._payload(view, payload_bytes)
        return message, payload_bytes

    def cut(self) -> None:
        """Ends what another thread is doing with it, and all that comes; `close` it all the same."""
        with contextlib.suppress(OSError):  # the peer was faster
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.cut()
        self._sock.close()

    def _exactly(self, size_bytes: int) -> bytearray:
        data = bytearray(size_bytes)
        self._into(memoryview(data))
        return data

    def _payload(self, view: memoryview | None, payload_bytes: int) -> None:
        if view is not None:
            self._into(view)
            return
        scratch = memoryview(bytearray(min(payload_bytes, 1 << 20)))
        while payload_bytes:
            piece = scratch[: min(payload_bytes, len(scratch))]
            self._into(piece)
            payload_bytes -= len(piece)

    def _into(self, view: memoryview) -> None:
        with _mapped_errors():
            while len(view):
                count = self._sock.recv_into(view)
                if count == 0:
                    raise StoreUnavailable("the peer closed the connection")
                view = view[count:]


@contextlib.contextmanager
def _mapped_errors() -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise DeadlineExceeded("the peer did not answer in time") from error
    except OSError as error:
        raise StoreUnavailable(f"the connection is lost: {error}") from error
