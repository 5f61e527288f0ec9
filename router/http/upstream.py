"""One keep-alive connection to an engine, and the pool of them.

A connection carries one `Leg` (router/http/leg.py) at a time and calls its `on_*` methods. The parser only
finds where the head and the message end; the bytes themselves go through untouched.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import httptools

from router.http.resolver import Resolver

if TYPE_CHECKING:
    from router.http.leg import Leg


# Of a response: nothing that clients may see as the engine sent it (router.http.one_hop).
_ONE_HOP = frozenset({b"connection", b"keep-alive", b"proxy-connection", b"te", b"upgrade"})
_USUAL_CONNECTION = (b"keep-alive", b"close")


class UpstreamConnection:
    """Lives on the event loop's thread, like everything in router.http.

    An asyncio.Protocol by its methods, not by inheritance: mypyc makes a native class of it then.
    """

    def __init__(self, pool: "UpstreamPool") -> None:
        self._pool = pool
        # Kept: asking for the running loop asks the kernel for the process id, each time (CPython 3.11).
        self.loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self.transport: asyncio.Transport | None = None
        self.idle_since = 0.0
        self.reused = False
        self.last_data = b""
        self._paused = False
        self._leg: Leg | None = None
        self._reset()

    def _reset(self) -> None:
        self._status = 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._has_one_hop = False
        self._head_passed = False
        self._complete = False
        self._keep_alive = False
        self._ends_at_close = False

    @property
    def is_usable(self) -> bool:
        return self.transport is not None and not self.transport.is_closing()

    def send(self, leg: "Leg", head: bytes, body: bytes) -> None:
        """Starts one request. `body` is referenced until the kernel has taken it."""
        assert self.transport is not None
        self._leg = leg
        self._reset()
        if len(body) < 65536:
            self.transport.write(head + body)
        else:
            self.transport.writelines((head, body))

    def pause_reading(self) -> None:
        if not self._paused and self.is_usable:
            self._paused = True
            self.transport.pause_reading()  # type: ignore[union-attr]

    def resume_reading(self) -> None:
        if self._paused and self.is_usable:
            self._paused = False
            self.transport.resume_reading()  # type: ignore[union-attr]

    def abandon(self) -> None:
        """The leg wants no more of this response: engines abort a request whose connection closes."""
        self._leg = None
        if self._complete:
            self._release()
        elif self.transport is not None:
            self.transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        tune_socket(transport)
        self._pool.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        leg, self._leg, self.transport = self._leg, None, None
        self._pool.closed(self)
        if leg is None:
            return
        if self._head_passed and self._ends_at_close and exc is None:
            leg.on_end()
        else:
            leg.on_lost("closed the connection" if exc is None else f"connection lost: {exc}")

    def eof_received(self) -> None:
        """The transport closes itself, and `connection_lost` follows."""

    def pause_writing(self) -> None:
        """Requests are written at once, however large: the client sent them within its limits."""

    def resume_writing(self) -> None: ...

    def data_received(self, data: bytes) -> None:
        leg = self._leg
        if leg is None or self._complete:
            self._break("sent bytes nobody asked for")
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._break(f"sent a malformed response: {error}")
            return
        self.last_data = data
        if self._head_passed:
            leg.on_data(data)
        else:
            leg.hold(data)
            if self._status >= 200:
                self._head_passed = True
                leg.on_head(self._status, self._headers, self._keep_alive, self._has_one_hop)
        # on_head may have abandoned this response, or even started the next one on this connection.
        if self._complete and self._leg is leg:
            self._leg = None
            self._release()
            leg.on_end()

    def _release(self) -> None:
        if self._keep_alive and self.transport is not None:
            self.resume_reading()  # a slow client must not leave it deaf for the next leg
            self._pool.release(self)
        elif self.transport is not None:
            self.transport.close()

    def _break(self, reason: str) -> None:
        leg, self._leg = self._leg, None
        if self.transport is not None:
            self.transport.abort()
        if leg is not None:
            leg.on_lost(reason)

    # httptools

    def on_message_begin(self) -> None:
        if self._complete:
            raise httptools.HttpParserError("more than one response")

    def on_header(self, name: bytes, value: bytes) -> None:
        lower = name.lower()
        self._headers.append((lower, value))
        if lower in _ONE_HOP and (lower != b"connection" or value.lower() not in _USUAL_CONNECTION):
            self._has_one_hop = True

    def on_headers_complete(self) -> None:
        parser = self._parser
        status = parser.get_status_code()
        if status < 200:
            self._headers, self._has_one_hop = [], False
            return
        self._status = status
        self._keep_alive = parser.should_keep_alive()
        if not self._keep_alive:
            names = {name for name, _ in self._headers}
            self._ends_at_close = not (names & {b"content-length", b"transfer-encoding"})

    def on_message_complete(self) -> None:
        if self._status:
            self._complete = True
        # else: an interim response (1xx); the real one follows. Leg.hold cuts its bytes out.


class UpstreamPool:
    """The connections to one engine. `idle_timeout_s` must stay below the engine's own keep-alive timeout
    (vLLM: 5 s), or requests race with its closing of idle connections."""

    def __init__(self, host: str, port: int, *, idle_timeout_s: float, connect_timeout_s: float) -> None:
        self.host = host
        self.port = port
        self._idle_timeout_s = idle_timeout_s
        self._connect_timeout_s = connect_timeout_s
        # Both in order of insertion: the last idle one was used last.
        self._idle: dict[UpstreamConnection, None] = {}
        self._open: dict[UpstreamConnection, None] = {}
        self._connecting: set[asyncio.Task[None]] = set()
        self._resolver = Resolver(host, port, connect_timeout_s / 2)
        host_text = f"[{host}]" if ":" in host else host
        self.host_line = f"host: {host_text}:{port}\r\n".encode()

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def acquire(self, now: float) -> UpstreamConnection | None:
        """The most recently used idle connection, or None: then `connect`."""
        while self._idle:
            connection, _ = self._idle.popitem()
            if connection.is_usable:
                if now - connection.idle_since <= self._idle_timeout_s:
                    connection.reused = True
                    return connection
                connection.transport.close()  # type: ignore[union-attr]
        return None

    def connect(self, on_done: Callable[[UpstreamConnection | None, str], None]) -> None:
        """Calls `on_done(connection, "")` or `on_done(None, reason)` later; never if the pool closes."""
        task = asyncio.get_running_loop().create_task(self._connect(on_done))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, on_done: Callable[[UpstreamConnection | None, str], None]) -> None:
        try:
            connection = await asyncio.wait_for(self._connected(), self._connect_timeout_s)
        except asyncio.TimeoutError:
            on_done(None, f"cannot be reached within {self._connect_timeout_s:g} s")
        except OSError as error:
            on_done(None, f"cannot be reached: {error.strerror or error}")
        except UnicodeError as error:  # a name that cannot be asked for
            on_done(None, f"cannot be reached: {error}")
        else:
            on_done(connection, "")

    async def _connected(self) -> UpstreamConnection:
        """OSError; when the name has several addresses, that of the last."""
        *others, last = await self._resolver.addresses()
        for address in others:
            with contextlib.suppress(OSError):
                return await self._open_to(address)
        return await self._open_to(last)

    async def _open_to(self, address: str) -> UpstreamConnection:
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: cast(Any, UpstreamConnection(self)), address, self.port
        )
        return cast(UpstreamConnection, connection)

    def opened(self, connection: UpstreamConnection) -> None:
        self._open[connection] = None

    def closed(self, connection: UpstreamConnection) -> None:
        self._open.pop(connection, None)
        self._idle.pop(connection, None)

    def release(self, connection: UpstreamConnection) -> None:
        connection.idle_since = connection.loop.time()
        self._idle[connection] = None

    def close_stale(self, now: float) -> None:
        """Closes what has been idle too long; the oldest come first."""
        for connection in list(self._idle):
            if now - connection.idle_since <= self._idle_timeout_s:
                break
            del self._idle[connection]
            if connection.transport is not None:
                connection.transport.close()

    async def close(self) -> None:
        """Cuts every connection; legs still on one are told that it was lost."""
        for task in list(self._connecting):
            task.cancel()
        await asyncio.gather(*self._connecting, return_exceptions=True)
        self._idle.clear()
        for connection in list(self._open):
            if connection.transport is not None:
                connection.transport.abort()


def tune_socket(transport: asyncio.BaseTransport) -> None:
    """For both sides. Without TCP_NODELAY a token waits for the peer's delayed ACK: 40 ms more to the first
    token (measured). Keep-alive probes find a host that vanished without a FIN within half a minute, also
    while a long prefill lets nothing flow."""
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):  # Linux
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
