"""One client's connection: frames in, answers out, bytes straight from and into the pool.

Everything happens in the loop's thread and nothing here awaits: a request is carried out where it arrives, a
request that has to wait lies in the core as a ticket.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from kvcore import metrics
from kvcore.errors import RemoteProtocolError, RequestRefused
from kvcore.transport.host import hurry_within_host
from kvcore.wire.codec import Frame, encode_frame, request_decoder
from kvcore.wire.messages import ErrorCode, ErrorReply, Message, Put, Reply, Request, Write
from kvcore.wire.receiver import STALL, FrameReceiver, Stall
from kvcore.wire.session import Phase, ServerSession
from store_server.core.objects import Session, StoredObject
from store_server.core.reads import Served
from store_server.core.writes import Incoming
from store_server.handlers import HANDLERS
from store_server.tenants import Client, scoped

if TYPE_CHECKING:
    from store_server.server import StoreServer

logger = logging.getLogger(__name__)

_STAGING_BYTES = 64 << 10
_READ_BYTES = 1 << 20
# Up to here a copy costs less than handing over pieces, and keeping track of the objects they are of.
_JOINED_BYTES = 16 << 10


class StoreConnection(asyncio.BufferedProtocol):
    server: "StoreServer"
    session: Session

    def __init__(self, server: "StoreServer") -> None:
        config = server.config
        self.server = server
        self.session = server.store.open_session()
        self._transport: asyncio.Transport | None = None
        self.client = Client()
        self._judge = ServerSession(tokens=(config.token, *server.tenants.tokens), max_keys=config.max_keys)
        self._receiver = FrameReceiver[Request](
            request_decoder(config.max_body_bytes, config.max_payload_bytes),
            self._on_frame,
            self._on_end,
            _STAGING_BYTES,
        )
        self._incoming: Incoming | None = None
        self._is_answered = False  # the current frame's answer is out, its payload is only skipped
        self._sending: list[Sequence[StoredObject]] = []
        self._is_write_paused = self._is_read_paused = False
        self._is_held_back = False  # the client does not take its answers
        self._is_stalled = False  # a Put waits for room
        self._stalled_put: Incoming | None = None
        self._stalled_refusal: RequestRefused | None = None
        self._is_local = False  # nothing changes on the way
        self._opened_at = server.clock.now()
        self._stalled_bytes = 0
        self._stalled_since = 0.0

    # ---- asyncio ---------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        # 0: `resume_writing` then means that nothing is left in the transport, so every byte of the pool that
        # was being sent may be reused.
        # (TLS copies while it encrypts, and takes 0 for a buffer that is always too full.)
        is_tls = transport.get_extra_info("sslcontext") is not None
        self._transport.set_write_buffer_limits(high=int(is_tls), low=0)
        sock = self._transport.get_extra_info("socket")
        self._is_local = sock.family == socket.AF_UNIX
        _tune(sock)
        if not self.server.admit(self):
            limit = self.server.max_connections
            self.send(ErrorReply(0, ErrorCode.OVER_LIMIT, f"{limit} clients are connected already", True))
            self._transport.close()

    def get_buffer(self, sizehint: int) -> memoryview:
        # The client may send on only when a read has ended; one of megabytes would let it wait.
        return self._receiver.views()[0][:_READ_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        self._process(self._receiver.received, nbytes)
        if self._is_write_paused:
            self._hold_back()
        self.server.settle()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        store = self.server.store
        store.close_session(self.session)
        for incoming in (self._incoming, self._stalled_put):
            if incoming is not None:
                store.writes.interrupted(self.session, incoming)
        self._incoming = self._stalled_put = None
        self._drained()
        # It knows us and we know it: a cycle, and its memory would wait for a full collection.
        del self._receiver
        self.server.forget(self)
        self.server.settle()

    def pause_writing(self) -> None:
        self._is_write_paused = True

    def resume_writing(self) -> None:
        self._is_write_paused = self._is_held_back = False
        self._drained()
        self._pause_or_resume_reading()

    # ---- answers ---------------------------------------------------------------------------------------

    def send(self, reply: Reply) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode_frame(cast(Message, reply)))

    def send_served(self, served: Served) -> None:
        """The objects count as used until the transport has let go of the last byte."""
        if self._transport is None or self._transport.is_closing():
            self.server.store.space.release(served.objects)
            return
        frame: list[bytes | memoryview] = [
            encode_frame(served.reply, served.payload_bytes),
            *self.server.views.of(served.spans),
        ]
        if served.payload_bytes <= _JOINED_BYTES:
            self._transport.write(b"".join(frame))
            self.server.store.space.release(served.objects)
            return
        self._sending.append(served.objects)
        self._transport.writelines(frame)
        if not self._is_write_paused:
            self._drained()

    def greeted(self) -> None:
        self._judge.greeted()

    def close(self) -> None:
        """Sends what is left, then closes."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    @property
    def unsent_bytes(self) -> int:
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def abort_if_stuck(self, now: float) -> None:
        """A reader that takes nothing must not hold on to the pool for ever, nor a stranger to a place."""
        config = self.server.config
        if self._judge.phase is Phase.NEW and now - self._opened_at > config.hello_timeout_ms / 1e3:
            logger.warning("a client says no hello, its connection is closed", extra=self._who())
            self.abort()
        unsent = self.unsent_bytes
        if not unsent or unsent != self._stalled_bytes:
            self._stalled_bytes, self._stalled_since = unsent, now
        elif now - self._stalled_since > config.send_timeout_ms / 1e3:
            logger.warning("a client takes no bytes, its connection is closed", extra=self._who())
            self.abort()

    # ---- frames ----------------------------------------------------------------------------------------

    def _on_frame(self, frame: Frame[Request]) -> Sequence[memoryview] | Stall | None:
        refusal = self._judge.judge(frame)
        if refusal is None and isinstance(frame.message, (Put, Write)):
            try:
                request = scoped(frame.message, self.client.prefix)
                return self._begin_payload(request, frame.payload_bytes)
            except RequestRefused as error:
                refusal = ErrorReply(frame.request_id, error.code, str(error), error.retryable)
        if refusal is not None:
            self._is_answered = True
            self.send(refusal)
            if self._judge.phase is Phase.CLOSED:
                logger.info("a client is refused", extra={**self._who(), "reason": refusal.message})
                self.close()
        return None

    def _begin_payload(self, request: Put | Write, payload_bytes: int) -> list[memoryview] | Stall:
        server = self.server
        if isinstance(request, Put):
            sizes_bytes = request.sizes_bytes
            expected_bytes = sum(sizes_bytes) + (8 * len(request.keys) if request.sums_follow else 0)
            if min(sizes_bytes, default=0) < 0 or expected_bytes != payload_bytes:
                raise RequestRefused(
                    ErrorCode.BAD_REQUEST,
                    f"the payload has {payload_bytes} bytes, the sizes add up to {expected_bytes}",
                )
            if self._stalled_refusal is not None:
                refusal, self._stalled_refusal = self._stalled_refusal, None
                raise refusal
            self._incoming, self._stalled_put = self._stalled_put or self._begin_put(request), None
            if self._incoming is None:
                self._is_stalled = True
                self._pause_or_resume_reading()
                return STALL
        else:
            self._incoming = server.store.writes.write_begin(self.session, request, payload_bytes)
            sizes_bytes = [payload_bytes // max(len(request.keys), 1)] * len(request.keys)
        targets = server.views.targets(self._incoming, sizes_bytes)
        if isinstance(self._incoming.checksums, bytearray):
            targets.append(memoryview(self._incoming.checksums))
        return targets

    def _begin_put(self, request: Put) -> Incoming | None:
        """None when it has to wait for room: its payload then stays where it is, in the client's socket."""
        store, session, clock = self.server.store, self.session, self.server.clock

        def attempt(is_last: bool) -> bool:
            try:
                self._stalled_put = store.writes.put_begin(
                    session, request, clock.now(), may_wait=not is_last
                )
                if self._stalled_put is None:
                    return False
            except RequestRefused as error:
                self._stalled_refusal = error
            self._is_stalled = False
            self._process(self._receiver.resume)
            self._pause_or_resume_reading()
            return True

        if not len(store.room):
            incoming = store.writes.put_begin(session, request, clock.now(), may_wait=True)
            if incoming is not None:
                return incoming
        store.room.park(session, attempt, clock.now())
        return None

    def _on_end(self, frame: Frame[Request]) -> None:
        if self._is_answered:
            self._is_answered = False
            return
        server = self.server
        now = server.clock.now()
        server.num_requests[type(frame.message)] += 1
        server.wakefulness.served()
        if self._incoming is not None:
            incoming, self._incoming = self._incoming, None
            self.send(server.store.writes.received(self.session, incoming, self._corrupt(incoming), now))
            return
        try:
            request = cast(Message, frame.message)
            if self.client.prefix:
                request = scoped(request, self.client.prefix)
            reply = HANDLERS[type(request)](self, request, now)
        except RequestRefused as error:
            reply = ErrorReply(frame.request_id, error.code, str(error), error.retryable)
        if isinstance(reply, Served):
            self.send_served(reply)
        elif reply is not None:
            self.send(reply)

    # ---- inside ----------------------------------------------------------------------------------------

    def _drained(self) -> None:
        if self._sending:
            release = self.server.store.space.release
            for objects in self._sending:
                release(objects)
            self._sending.clear()

    def _corrupt(self, incoming: Incoming) -> Sequence[int] | None:
        """As `Writes.received` wants it."""
        if self.server.config.verify_on_write:
            return self.server.views.corrupt(incoming)
        return () if self._is_local else None

    def _process(self, step: Callable[..., None], *arguments: int) -> None:
        """Takes in what has come. Whatever goes wrong ends this connection and no other."""
        try:
            step(*arguments)
        except RemoteProtocolError as error:
            self._break(f"protocol error: {error}")
        except Exception:
            logger.exception("a request failed; its connection is closed", extra=self._who())
            self._break("internal error")

    def _hold_back(self) -> None:
        """A client that does not take its answers gets no new ones."""
        if self.unsent_bytes > self.server.config.max_unsent_bytes:
            self._is_held_back = True
            self._pause_or_resume_reading()

    def _pause_or_resume_reading(self) -> None:
        wanted = self._is_held_back or self._is_stalled
        if self._transport is None or self._transport.is_closing() or wanted == self._is_read_paused:
            return
        self._is_read_paused = wanted
        if wanted:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _break(self, reason: str) -> None:
        self.server.store.counters[metrics.PROTOCOL_ERRORS_TOTAL] += 1
        logger.warning("connection closed", extra={**self._who(), "reason": reason})
        self.abort()

    def _who(self) -> dict[str, object]:
        peer = self._transport.get_extra_info("peername") if self._transport is not None else ""
        who = {"session": self.session.number, "client": self.session.client_name, "peer": peer or "unix"}
        return who if self.client.is_operator else {**who, "tenant": self.client.name}


def _tune(sock: Any) -> None:
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # The host of a client may vanish without a word; its reservations must not stay with it.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3)):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        hurry_within_host(sock)
