"""The client's side: one `ClientConnection` per socket, requests served strictly in order."""

import asyncio
from collections import deque
from typing import Protocol, cast

from router.http.limits import HttpLimits
from router.http.parser import BadRequest, Phase, RequestParser
from router.http.request import Request, expects_continue
from router.http.response import Response, error_response
from router.http.upstream import tune_socket

_LINGER_S = 2.0
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class ActiveRequest(Protocol):
    """What answers the current request, as its connection sees it."""

    def client_gone(self) -> None:
        """The client closed its connection: stop, close both legs, write nothing more."""
        ...

    def client_paused(self) -> None: ...

    def client_resumed(self) -> None: ...

    def sweep(self, now: float) -> None:
        """Called about twice a second, for deadlines."""
        ...


class Application(Protocol):
    """What a connection needs of the router."""

    limits: HttpLimits
    draining: bool

    def opened(self, client: "ClientConnection") -> bool:
        """False: one too many."""
        ...

    def closed(self, client: "ClientConnection") -> None: ...

    def handle(self, client: "ClientConnection", request: Request) -> ActiveRequest | None:
        """Begins to answer; None when it already has."""
        ...

    def refusal(self, client: "ClientConnection", head: Request) -> Response | None:
        """What would be answered whatever body follows this head."""
        ...

    def refused(self, status: int) -> None:
        """A request was refused before it could be routed (for the metrics)."""
        ...


class ClientConnection:
    """Lives on the event loop's thread. Whoever answers calls `write` any number of times and then `finish`
    once, or `respond` once.

    An asyncio.Protocol by its methods, not by inheritance: mypyc makes a native class of it then.
    """

    def __init__(self, app: Application) -> None:
        self._app = app
        # Kept: asking for the running loop asks the kernel for the process id, each time (CPython 3.11).
        self.loop = asyncio.get_running_loop()
        self._parser = RequestParser(app.limits, self._request_complete, self._body_awaited)
        self._queue: deque[Request] = deque()
        self._current: Request | None = None
        self._active: ActiveRequest | None = None
        self._refusal: Response | None = None
        self._pumping = False
        self._reading_paused = False
        self.write_paused = False
        self._stalled_since = 0.0
        self._phase = Phase.IDLE
        self._phase_since = self.loop.time()
        self._served_any = False
        self._lingering_since = 0.0

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self.write = self.transport.write
        tune_socket(transport)
        if not self._app.opened(self):
            self._refuse(error_response(503, "too many connections to the router; try again later"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._app.closed(self)
        self._queue.clear()
        self._refusal = None
        active, self._active, self._current = self._active, None, None
        if active is not None:
            active.client_gone()

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        parser = self._parser
        try:
            parser.feed(data)
        except BadRequest as refusal:
            self._refuse(error_response(refusal.status, refusal.message))
            return
        if parser.phase is not self._phase:
            self._phase = parser.phase
            self._phase_since = self.loop.time()

    def eof_received(self) -> None:
        """The transport closes itself, and `connection_lost` follows."""

    def pause_writing(self) -> None:
        self.write_paused = True
        self._stalled_since = self.loop.time()
        if self._active is not None:
            self._active.client_paused()

    def resume_writing(self) -> None:
        self.write_paused = False
        if self._active is not None:
            self._active.client_resumed()

    # The parser's results

    def _request_complete(self, request: Request) -> None:
        self._queue.append(request)
        if self._current is None:
            self._pump()
        elif len(self._queue) >= self._app.limits.max_pipelined and not self._reading_paused:
            self._reading_paused = True
            self.transport.pause_reading()

    def _body_awaited(self, head: Request) -> None:
        # With an earlier answer under way nothing could be sent in order; who waits for leave then sends its
        # body after a while by itself (RFC 9110 section 10.1.1).
        if self._current is not None:
            return
        refusal = self._app.refusal(self, head)
        if refusal is not None:
            self._refuse(refusal)
        elif expects_continue(head):
            self.write(_CONTINUE)

    def _pump(self) -> None:
        """Begins the next request. A loop, no recursion: an answer may be over before `handle` returns."""
        if self._pumping:
            return
        self._pumping = True
        try:
            while self._queue and self._current is None and not self.transport.is_closing():
                self._current = request = self._queue.popleft()
                active = self._app.handle(self, request)
                if self._current is request:
                    self._active = active
        finally:
            self._pumping = False
        if self._current is not None:
            return
        if self._reading_paused and not self.transport.is_closing():
            self._reading_paused = False
            self.transport.resume_reading()
        if self._refusal is not None:
            self._answer_refusal(self._refusal)

    # For whoever answers

    @property
    def closes_after_response(self) -> bool:
        """The current response is the last on this connection and should say so."""
        request = self._current
        return self._app.draining or request is None or not request.keep_alive

    def respond(self, response: Response) -> None:
        """Sends a whole response built here and finishes the request."""
        request = self._current
        close = self.closes_after_response
        with_body = request is None or request.method != b"HEAD"
        self.write(response.encode(close=close, with_body=with_body))
        self.finish(close=close)

    def finish(self, *, close: bool) -> None:
        """The current response has been written completely."""
        self._current = None
        self._active = None
        self._served_any = True
        if close:
            self._queue.clear()
            self.transport.close()
            return
        self._phase_since = self.loop.time()
        if self._queue or self._refusal is not None or self._reading_paused:
            self._pump()

    def abort(self) -> None:
        """Cuts the connection: the only honest end of a response that cannot be completed."""
        self._current = None
        self._active = None
        self.transport.abort()

    def close_if_idle(self) -> None:
        """For draining: connections with a request close when it is answered."""
        if self._current is None and not self._queue and self._phase is Phase.IDLE:
            self.transport.close()

    def _refuse(self, refusal: Response) -> None:
        """Answers what is not read to its end, after the answers to the requests before it, and closes."""
        self._app.refused(refusal.status)
        self._refusal = refusal
        self._answer_refusal(refusal)

    def _answer_refusal(self, refusal: Response) -> None:
        """Our half first: closing at once while the client still sends would reset the connection, and the
        client would lose the answer (RFC 9112 section 9.6). What it sends is dropped meanwhile.
        """
        if self._current is None and not self.transport.is_closing() and not self._lingering_since:
            self._lingering_since = self.loop.time()
            self.write(refusal.encode(close=True))
            self.transport.write_eof()

    # Deadlines

    def sweep(self, now: float) -> None:
        """Once in a while instead of a timer per request: requests pay nothing for their deadlines."""
        limits = self._app.limits
        if self.write_paused and (now - self._stalled_since) * 1e3 > limits.stall_timeout_ms:
            self.transport.abort()
            return
        if self._active is not None:
            self._active.sweep(now)
            return
        if self._lingering_since and now - self._lingering_since > _LINGER_S:
            self.transport.abort()
        if self._refusal is not None or self._current is not None:
            return
        waited_ms = (now - self._phase_since) * 1e3
        if self._phase is Phase.BODY:
            allowed_ms = limits.body_grace_ms + self._parser.body_bytes * 1e3 / limits.min_body_bytes
            late = waited_ms > allowed_ms
        elif self._phase is Phase.HEAD:
            late = waited_ms > limits.header_timeout_ms
        else:
            # Browsers open connections to spare: one on which nothing has come is no request that was late.
            late = False
            if waited_ms > (limits.idle_timeout_ms if self._served_any else limits.header_timeout_ms):
                self.transport.close()
        if late:
            self._refuse(error_response(408, "the request did not arrive in time"))
