"""Bytes from a client in, complete `Request`s out. Sans-IO: no socket, no clock."""

from collections.abc import Callable
from enum import Enum

import httptools

from router.http.known_heads import KnownHead, split_head
from router.http.limits import HttpLimits
from router.http.one_hop import fields_named, lines_without
from router.http.request import Request

# RFC 9110 section 7.6.1: these concern one hop. Host and Content-Length are written anew for the engine, and
# Expect has been answered by us.
_NOT_FORWARDED = frozenset(
    {
        b"connection",
        b"content-length",
        b"expect",
        b"host",
        b"http2-settings",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_USUAL_CONNECTION = (b"keep-alive", b"close")
_NO_FIELDS: frozenset[bytes] = frozenset()
# Of a body kept apart. A client may send chunks of one byte, and each piece costs forty more.
_MAX_PIECES = 1024


class BadRequest(Exception):
    """The client's bytes cannot be served; `status` is the HTTP status to answer before closing."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class Phase(Enum):
    IDLE = "idle"
    HEAD = "head"
    BODY = "body"


class RequestParser:
    """Feeds `on_request` with each complete request, in order, from inside `feed`.

    `on_body_awaited` gets a request whose head has come and whose body has not, not all of it: once, and with
    an empty body. After `BadRequest` was raised nothing more may be fed. `body_bytes` counts the body read so
    far.
    """

    def __init__(
        self,
        limits: HttpLimits,
        on_request: Callable[[Request], None],
        on_body_awaited: Callable[[Request], None],
    ) -> None:
        self._limits = limits
        self._on_request = on_request
        self._on_body_awaited = on_body_awaited
        self._parser = httptools.HttpRequestParser(self)
        self._error: BadRequest | None = None
        self._closing = False
        self._keep_alive = True
        self._is_http_1_0 = False
        self._forward_lines = b""
        self._is_announced = True
        self.phase = Phase.IDLE
        self.body_bytes = 0
        self._head_bytes = 0
        self._framing_bytes = 0  # since the last of the body came: chunk extensions, trailers
        self._num_complete = 0
        self._method = self._path = b""
        self._reset()

    def _reset(self) -> None:
        self._known: KnownHead | None = None  # the one the other attributes are of, if an equal one may come
        self._head_is_complete = False
        self._upgrades = False
        self._target = b""
        self._headers: dict[bytes, bytes] = {}
        self._lines: list[bytes] = []
        self._dropped: list[bytes] = []
        self._named = _NO_FIELDS  # in Connection
        self._body: list[bytes] = []
        self._num_joined = 0  # of its first pieces

    def feed(self, data: bytes) -> None:
        """Raises BadRequest."""
        if self._closing:
            return  # RFC 9112 section 9.6: what follows a request with "Connection: close" is not read
        if self.phase is not Phase.IDLE or self._head_bytes:
            self._parse(data)
            return
        # Between requests llhttp remembers nothing, so an equal head means the same again; most clients send
        # the same one over and over, and for a small request parsing it is a tenth of all there is to do.
        known = self._known
        length = known.length_of(data) if known is not None else b""
        if length and int(length) <= self._limits.max_body_bytes:
            self.body_bytes = int(length)
            headers = {**self._headers, b"content-length": length}
            body = data[len(data) - self.body_bytes :]
            target, path, lines = self._target, self._path, self._forward_lines
            self._on_request(Request(self._method, target, path, headers, lines, body, True, False))
            return
        head, num_before = split_head(data), self._num_complete
        self._parse(data)
        is_one = self.phase is Phase.IDLE and self._num_complete == num_before + 1
        if head is not None and is_one and self._keep_alive and b"expect" not in self._headers:
            self._known = head

    def _parse(self, data: bytes) -> None:
        was_in_body, body_bytes, num_before = self.phase is Phase.BODY, self.body_bytes, self._num_complete
        if not was_in_body:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._refeed_without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            if self._closing and self._error is None:
                return
            raise self._error or BadRequest(400, f"malformed HTTP request: {error}") from None
        if self.phase is Phase.HEAD and self._head_bytes > self._limits.max_header_bytes:
            raise self._too_large_head()
        if was_in_body and self._num_complete == num_before:
            # llhttp collects a trailer until it ends, as it does a line of the head.
            self._framing_bytes = self._framing_bytes + len(data) if self.body_bytes == body_bytes else 0
            if self._framing_bytes > self._limits.max_header_bytes:
                raise self._too_large_head()
        if self.phase is Phase.BODY and not self._is_announced:
            self._is_announced = True
            self._on_body_awaited(self._request(b""))

    def _too_large_head(self) -> BadRequest:
        return BadRequest(431, f"request head larger than {self._limits.max_header_bytes} bytes")

    def _refeed_without_upgrade(self, rest: bytes) -> None:
        """Clients such as Java's offer h2c on every request; the offer is declined by ignoring it (RFC 9110
        section 7.8), but llhttp has stopped before the body. So the head is parsed again without it."""
        if self._parser.get_method() == b"CONNECT":
            raise BadRequest(405, "CONNECT is not supported")
        method, target, lines = self._parser.get_method(), self._target, self._lines
        framing = [line for line in self._dropped if not line.lower().startswith(b"upgrade:")]
        version = self._parser.get_http_version().encode()
        self._parser = httptools.HttpRequestParser(self)
        self._parse(
            b"%b %b HTTP/%b\r\n%b%b\r\n" % (method, target, version, b"".join(lines), b"".join(framing))
            + rest
        )

    # Callbacks of httptools, from inside feed_data.

    def on_message_begin(self) -> None:
        self._reset()
        self.phase = Phase.HEAD

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_is_complete:
            return  # a trailer
        lower = name.lower()
        self._headers[lower] = value
        if lower in _NOT_FORWARDED:
            self._dropped.append(b"%b: %b\r\n" % (name, value))
            if lower == b"connection" and value.lower() not in _USUAL_CONNECTION:
                self._named |= fields_named(value)
        else:
            self._lines.append(b"%b: %b\r\n" % (name, value))

    def on_headers_complete(self) -> None:
        parser = self._parser
        self._upgrades = parser.should_upgrade()
        if self._upgrades:
            return
        self._head_is_complete = True
        headers = self._headers
        self._is_http_1_0 = parser.get_http_version() == "1.0"
        self._keep_alive = not self._is_http_1_0 and parser.should_keep_alive()
        self._head_bytes = 0
        self.phase = Phase.BODY
        self.body_bytes = 0
        self._framing_bytes = 0
        self._is_announced = False
        if self._named:
            self._lines = lines_without(self._lines, self._named)
        self._forward_lines = b"".join(self._lines)
        if len(self._forward_lines) > self._limits.max_header_bytes:
            self._fail(self._too_large_head())
        if int(headers.get(b"content-length", b"0")) > self._limits.max_body_bytes:
            self._fail(self._too_large_body())
        if not self._is_http_1_0 and headers.get(b"expect", b"100-continue").lower() != b"100-continue":
            self._fail(BadRequest(417, "only 'Expect: 100-continue' is understood"))
        self._target = _origin_form(self._target)
        if not self._target:
            self._fail(BadRequest(400, "the request target is not a path"))
        self._method, self._path = parser.get_method(), self._target.partition(b"?")[0]

    def on_body(self, data: bytes) -> None:
        self.body_bytes += len(data)
        if self.body_bytes > self._limits.max_body_bytes:
            self._fail(self._too_large_body())
        self._body.append(data)
        if len(self._body) - self._num_joined > _MAX_PIECES:
            self._body[self._num_joined :] = [b"".join(self._body[self._num_joined :])]
            self._num_joined += 1

    def on_message_complete(self) -> None:
        if self._upgrades:
            return
        self.phase = Phase.IDLE
        self._num_complete += 1
        self._closing = not self._keep_alive
        body, self._body = self._body, []
        self._on_request(self._request(body[0] if len(body) == 1 else b"".join(body)))

    def _request(self, body: bytes) -> Request:
        return Request(
            self._method,
            self._target,
            self._path,
            self._headers,
            self._forward_lines,
            body,
            self._keep_alive,
            self._is_http_1_0,
        )

    def _too_large_body(self) -> BadRequest:
        return BadRequest(413, f"request body larger than {self._limits.max_body_bytes} bytes")

    def _fail(self, error: BadRequest) -> None:
        self._error = error
        raise error


def _origin_form(target: bytes) -> bytes:
    """Path and query of a target, absolute ones too (RFC 9112 section 3.2.2); empty for anything else."""
    if target[:1] == b"/":
        return target
    scheme, separator, rest = target.partition(b"://")
    if not separator or scheme.lower() not in (b"http", b"https"):
        return b""
    _, slash, path = rest.partition(b"/")
    return b"/" + path if slash else b"/"
