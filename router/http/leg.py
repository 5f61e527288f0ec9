"""A leg: one request on its way to one engine and the response on its way back.

Its owner decides what happens to the response once the head is there: relay it to the client byte for byte,
hold it, or cancel. Owners are the P/D protocols (router/protocols) and `router.http.fetch`.
"""

from collections.abc import Callable
from enum import Enum
from typing import Protocol

import httptools

from router.http.one_hop import response_lines
from router.http.upstream import UpstreamConnection, UpstreamPool

# What is held of a response nobody relays (a prefill answer, an error). A prefill answer with prompt
# logprobs may be larger; then only its status matters and the rest is dropped.
MAX_HELD_BYTES = 4 << 20


class LegTarget(Protocol):
    """What a leg needs of an instance."""

    pool: UpstreamPool
    in_flight: int


class LegOwner(Protocol):
    """Each leg ends with exactly one of `leg_ended` and `leg_lost`, unless its owner cancels it."""

    def leg_head(self, leg: "Leg") -> None:
        """`status` and `headers` are known. Not one byte has been passed on yet."""
        ...

    def leg_ended(self, leg: "Leg") -> None:
        """The response is complete."""
        ...

    def leg_lost(self, leg: "Leg") -> None:
        """No (complete) response: `failure` says why, `status` is 0 when not even a head came."""
        ...


class LegState(Enum):
    NEW = "new"
    CONNECTING = "connecting"
    WAITING = "waiting"
    HOLDING = "holding"
    RELAYING = "relaying"
    OVER = "over"


class Leg:
    __slots__ = (
        "_body",
        "_connection",
        "_head",
        "_held",
        "_held_bytes",
        "_owner",
        "failure",
        "has_one_hop",
        "headers",
        "keep_alive",
        "on_data",
        "state",
        "status",
        "target",
        "truncated",
    )

    def __init__(self, owner: LegOwner, target: LegTarget) -> None:
        self._owner = owner
        self.target = target
        self.state = LegState.NEW
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []  # names in lower case
        # Headers that are not the client's, beyond "Connection: keep-alive" or close.
        self.has_one_hop = False
        self.failure = ""
        self.keep_alive = True
        self.truncated = False
        # An attribute and not a method: in a relay it is the client's write itself, no call in between.
        self.on_data: Callable[[bytes], object] = self.hold
        self._connection: UpstreamConnection | None = None
        self._held: list[bytes] = []
        self._held_bytes = 0

    def start(self, head: bytes, body: bytes, now: float) -> None:
        """`body` is referenced until the response head arrives, for one resend on a fresh connection."""
        self.target.in_flight += 1
        self._head = head
        self._body = body
        connection = self.target.pool.acquire(now)
        if connection is not None:
            self._send(connection)
        else:
            self._connect()

    def _connect(self) -> None:
        self.state = LegState.CONNECTING
        self.target.pool.connect(self._connected)

    def _connected(self, connection: UpstreamConnection | None, reason: str) -> None:
        if self.state is LegState.OVER:
            if connection is not None:
                self.target.pool.release(connection)
        elif connection is None:
            self._lose(reason)
        else:
            self._send(connection)

    def _send(self, connection: UpstreamConnection) -> None:
        self.state = LegState.WAITING
        self._connection = connection
        connection.send(self, self._head, self._body)

    # What the owner may do.

    def relay(self, write: Callable[[bytes], object], extra_lines: bytes) -> None:
        """From `leg_head`: passes the response on, verbatim but for `extra_lines` after the status line and
        for what concerns the engine's connection only."""
        self.state = LegState.RELAYING
        self.on_data = write
        raw = self.held_response()
        end_of_status_line = raw.index(b"\r\n") + 2
        if self.has_one_hop:
            rest = response_lines(self.headers) + raw[raw.index(b"\r\n\r\n") + 2 :]
        else:
            rest = raw[end_of_status_line:]
        write(raw[:end_of_status_line] + extra_lines + rest)
        self._held.clear()

    def relay_body(self, write: Callable[[bytes], object], extra_lines: bytes) -> None:
        """As `relay`, for a client of HTTP/1.0, which knows no chunks: the body ends with the connection."""
        self.state = LegState.RELAYING
        raw = self.held_response()
        headers = [one for one in self.headers if one[0] != b"transfer-encoding"]
        status_line = raw[: raw.index(b"\r\n") + 2]
        closes = (b"connection", b"close")
        write(b"%b%b%b\r\n" % (status_line, extra_lines, response_lines([*headers, closes])))
        decoder = BodyDecoder(write)
        decoder.feed(raw)
        self.on_data = decoder.feed
        self._held.clear()

    def held_response(self) -> bytes:
        """The bytes of the response so far, from its status line on."""
        raw = self._held[0] if len(self._held) == 1 else b"".join(self._held)
        while raw[9:10] == b"1":  # interim responses have no body
            raw = raw[raw.index(b"\r\n\r\n") + 4 :]
        return raw

    def header(self, lower_name: bytes) -> bytes | None:
        for name, value in self.headers:
            if name == lower_name:
                return value
        return None

    def cancel(self) -> None:
        """Idempotent. Closes the connection unless the response is complete; the owner hears no more."""
        if self.state in (LegState.NEW, LegState.OVER):
            self.state = LegState.OVER
            return
        self._finish()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abandon()

    def pause(self) -> None:
        if self._connection is not None:
            self._connection.pause_reading()

    def resume(self) -> None:
        if self._connection is not None:
            self._connection.resume_reading()

    @property
    def is_silent_stream(self) -> bool:
        """From `leg_head`: an event stream of which nothing but the head has come."""
        if not (self.header(b"content-type") or b"").startswith(b"text/event-stream"):
            return False
        raw = self.held_response()
        return raw.find(b"\r\n\r\n") + 4 == len(raw)

    @property
    def last_data(self) -> bytes:
        """What was received last, in the buffer it came in."""
        return self._connection.last_data if self._connection is not None else b""

    @property
    def stopped_between_events(self) -> bool:
        """After `leg_lost` in a relay: the client's chunked event stream ends after a whole chunk that ends
        an event, so that one more event can be appended to it."""
        return self.last_data.endswith((b"\n\n\r\n", b"\r\n\r\n\r\n"))

    # What the connection calls.

    def hold(self, data: bytes) -> None:
        self._held_bytes += len(data)
        if self._held_bytes <= MAX_HELD_BYTES:
            self._held.append(data)
        else:
            self.truncated = True

    def on_head(
        self, status: int, headers: list[tuple[bytes, bytes]], keep_alive: bool, has_one_hop: bool
    ) -> None:
        self.state = LegState.HOLDING
        self.status = status
        self.headers = headers
        self._body = b""
        self.keep_alive = keep_alive
        self.has_one_hop = has_one_hop
        self._owner.leg_head(self)

    def on_end(self) -> None:
        self._finish()
        self._owner.leg_ended(self)

    def on_lost(self, reason: str) -> None:
        connection = self._connection
        if connection is not None and connection.reused and not self._held and not self.status:
            # The engine closed an idle connection while our request was under way to it (RFC 9112 9.3.1).
            self._connection = None
            self._connect()
            return
        self._lose(reason)

    def _lose(self, reason: str) -> None:
        self.failure = reason
        self._finish()
        self._owner.leg_lost(self)

    def _finish(self) -> None:
        self.state = LegState.OVER
        self.on_data = _drop  # `hold` would tie the leg to itself, for the garbage collector to find
        self.target.in_flight -= 1


def _drop(data: bytes) -> None:
    """Nothing comes any more."""


class BodyDecoder:
    """Takes the bytes of one response, hands out its body without head and chunk framing."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self.on_body = write
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        self._parser.feed_data(data)


def decode_body(raw_response: bytes) -> bytes:
    """The body of a complete response."""
    parts: list[bytes] = []
    BodyDecoder(parts.append).feed(raw_response)
    return b"".join(parts)
