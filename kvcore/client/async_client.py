"""AsyncStoreClient: the store from an event loop (asyncio or uvloop), over the same sans-IO core.

For those who look rather than move bulk: the router, admin tools. Payload goes over the connection itself.
"""

import asyncio
import contextlib
import logging
import os
import random
from collections.abc import Callable, Sequence
from typing import Any, cast

from kvcore.client.address import Address, parse_address, tune_socket
from kvcore.client.async_management import AsyncManagement
from kvcore.client.base import UNAVAILABLE_LOOKUP, LookupResult, is_lookup_of
from kvcore.client.link import DEFAULT_TIMEOUT_MS, FIRST_PAUSE_S, LONGEST_PAUSE_S, REFUSED_PAUSE_S
from kvcore.client.names import key_runs, named
from kvcore.client.silence import Silence
from kvcore.client.tls import client_context
from kvcore.errors import RemoteProtocolError, RequestRefused, StoreUnavailable
from kvcore.layout import as_views, total_bytes
from kvcore.transport.base import Buffer
from kvcore.transport.channel import Outcome
from kvcore.transport.checksums import checksum, is_corrupt
from kvcore.transport.parts import statuses_of
from kvcore.wire import messages as m
from kvcore.wire.codec import Frame, encode_frame, reply_decoder
from kvcore.wire.messages import Message, Reply, Status
from kvcore.wire.receiver import FrameReceiver
from kvcore.wire.session import ClientSession, refusal, ungreeted

logger = logging.getLogger(__name__)


class _Pending:
    def __init__(self, future: "asyncio.Future[Outcome]") -> None:
        self.future = future
        self.asked_at = 0.0  # when the last byte of the request had left us
        self.timer: asyncio.TimerHandle | None = None
        self.reply: Reply | None = None
        self.payload = bytearray()


class _Connection(asyncio.BufferedProtocol):
    """One connection; used only from its loop. Payload lands in memory of its own, so a deadline may pass at
    any time without harm."""

    def __init__(self, on_lost: Callable[["_Connection", str], None], silence_s: float) -> None:
        self.session: ClientSession[_Pending] = ClientSession()
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._silence = Silence(silence_s, self._loop.time())
        self._decoder = reply_decoder()
        self._receiver: FrameReceiver[Reply] = FrameReceiver(self._decoder, self._on_frame, self._on_end)
        self._current: _Pending | None = None
        self._transport: asyncio.Transport | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._given_bytes = self._taken_bytes = 0  # to the transport; by it, when last looked at
        self._has_ended = False
        self.closed = asyncio.Event()

    async def ask(
        self,
        kind: type[Message],
        fields: tuple[object, ...],
        timeout_s: float,
        payload: Sequence[memoryview] = (),
    ) -> tuple[Outcome, bytearray]:
        """The answer and its payload. Never raises for what the store does."""
        if self._transport is None or self._has_ended or self._transport.is_closing():
            return Status.UNAVAILABLE, bytearray()
        pending = _Pending(self._loop.create_future())
        request_id = self.session.start(kind, pending)
        head = encode_frame(kind(request_id, *fields), total_bytes(payload))
        self._given_bytes += len(head) + total_bytes(payload)
        pending.asked_at = self._loop.time()
        pending.timer = self._loop.call_later(timeout_s, self._expire, pending)
        try:
            if payload:
                self._transport.writelines([head, *payload])
                await self._writable.wait()
                pending.asked_at = self._loop.time()
            else:
                self._transport.write(head)
            return await pending.future, pending.payload
        finally:
            if pending.timer is not None:
                pending.timer.cancel()

    def _has_taken_some(self) -> bool:
        assert self._transport is not None
        taken_bytes = self._given_bytes - self._transport.get_write_buffer_size()
        before, self._taken_bytes = self._taken_bytes, taken_bytes
        return taken_bytes > before

    def close(self, reason: str) -> None:
        if self._transport is not None:
            self._transport.abort()
        self._end(reason)

    # ---- asyncio.BufferedProtocol ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are Transports in deed, not by name.
        self._transport = cast(asyncio.Transport, transport)
        tune_socket(transport.get_extra_info("socket"))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._receiver.views()[0]

    def buffer_updated(self, nbytes: int) -> None:
        self._silence.heard(self._loop.time())
        try:
            self._receiver.received(nbytes)
        except RemoteProtocolError as error:
            self.close(str(error))

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._silence.heard(self._loop.time())
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()
        self._end(str(exc or "the store closed the connection"))

    def _end(self, reason: str) -> None:
        if self._has_ended:
            return
        self._has_ended = True
        self._writable.set()
        orphans = self.session.close()
        if self._current is not None:
            orphans.append(self._current)
        for pending in orphans:
            _settle(pending, Status.UNAVAILABLE)
        self._on_lost(self, reason)

    # ---- frames ----------------------------------------------------------------------------------------

    def _on_frame(self, frame: Frame[Reply]) -> list[memoryview]:
        pending = self._current = self.session.receive(frame)
        pending.reply = frame.message
        if isinstance(frame.message, m.HelloReply):
            self._decoder.max_payload_bytes = frame.message.max_payload_bytes
        pending.payload = bytearray(frame.payload_bytes)
        return [memoryview(pending.payload)]

    def _on_end(self, frame: Frame[Reply]) -> None:
        pending, self._current = self._current, None
        if pending is not None and pending.reply is not None:
            _settle(pending, pending.reply)

    def _expire(self, pending: _Pending) -> None:
        _settle(pending, Status.TIMED_OUT)
        if not self._writable.is_set() and self._has_taken_some():
            self._silence.heard(self._loop.time())
        if self._silence.missed(self._loop.time(), pending.asked_at):
            self.close(f"the store has been silent for {self._silence.limit_s:.1f} s")
        elif not self._writable.is_set():
            # Its sender has to wait until the bytes are out: only then they are the caller's again.
            pending.timer = self._loop.call_later(self._silence.limit_s, self._expire, pending)


class AsyncStoreClient(AsyncManagement):
    """Make one with `await AsyncStoreClient.connect(address)`, from the loop that is going to use it.

    The options are those of StoreClient. Without a store every call is a miss at once, and a task keeps
    looking for the store.
    """

    def __init__(
        self,
        address: str,
        *,
        token: str = "",
        timeout_ms: float = DEFAULT_TIMEOUT_MS,
        connect_timeout_ms: float = 2000.0,
        silence_ms: float = 2000.0,
        client_name: str = "",
        checksums: bool = True,
        tls_ca: str = "",
        tls_cert: str = "",
        tls_key: str = "",
    ) -> None:
        self._address: Address = parse_address(address)
        self._tls = client_context(self._address, tls_ca, tls_cert, tls_key)
        self._token = token
        self._timeout_s = timeout_ms / 1e3
        self._connect_timeout_s = connect_timeout_ms / 1e3
        self._silence_s = silence_ms / 1e3
        self._client_name = client_name or f"python {os.getpid()}"
        self._checksums = checksums
        self._connection: _Connection | None = None
        self._closed = False
        self._task: asyncio.Task[None] | None = None
        self.last_error = ""

    @classmethod
    async def connect(cls, address: str, **options: Any) -> "AsyncStoreClient":
        """Waits for the first attempt. RequestRefused when the store does not want us; one that is not there
        is no error."""
        client = cls(address, **options)
        try:
            await client._open()
        except (OSError, StoreUnavailable) as error:
            client.last_error = str(error)
            client._look_for_store()
        return client

    @property
    def connected(self) -> bool:
        return self._connection is not None

    async def lookup(
        self, keys: Sequence[bytes], *, include_pending: bool = False, timeout_ms: float | None = None
    ) -> LookupResult:
        layers_ready: list[int] = []
        tiers: list[int] = []
        load = 0.0
        if self._connection is None:
            return UNAVAILABLE_LOOKUP
        for run in key_runs(list(keys), self._connection.session.max_keys):
            outcome, _ = await self._ask(m.Lookup, (run, include_pending), timeout_ms)
            if not isinstance(outcome, m.LookupReply) or not is_lookup_of(run, outcome):
                return UNAVAILABLE_LOOKUP
            layers_ready += outcome.layers_ready
            tiers += outcome.tiers
            load = outcome.load
            if outcome.num_hits < len(run):
                break
        return LookupResult(num_hits=len(layers_ready), layers_ready=layers_ready, tiers=tiers, load=load)

    async def get(self, key: str | bytes) -> bytes | None:
        outcome, payload = await self._ask(m.Read, ([named(key)],))
        if not isinstance(outcome, m.ReadReply) or outcome.statuses != bytes((Status.OK,)):
            return None
        if self._checksums and outcome.checksums and is_corrupt([memoryview(payload)], outcome.checksums):
            return None
        return bytes(payload)

    async def put(self, key: str | bytes, value: Buffer) -> Status:
        views = as_views(value)
        size_bytes = total_bytes(views)
        if not size_bytes:
            raise ValueError("an empty value cannot be stored: an object has at least one byte")
        if self._connection is not None and size_bytes > self._connection.session.max_payload_bytes:
            return Status.TOO_LARGE
        sums = [checksum(views)] if self._checksums else []
        outcome, _ = await self._ask(m.Put, ([named(key)], [size_bytes], sums), payload=views)
        return statuses_of(outcome, 1)[0]

    async def close(self) -> None:
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if (connection := self._connection) is not None:
            connection.close("closed by its owner")
            await connection.closed.wait()

    async def __aenter__(self) -> "AsyncStoreClient":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    @property
    def _max_keys(self) -> int | None:
        return self._connection.session.max_keys if self._connection is not None else None

    async def _ask(
        self,
        kind: type[Message],
        fields: tuple[object, ...],
        timeout_ms: float | None = None,
        payload: Sequence[memoryview] = (),
    ) -> tuple[Outcome, bytearray]:
        if self._connection is None:
            return Status.UNAVAILABLE, bytearray()
        timeout_s = self._timeout_s if timeout_ms is None else timeout_ms / 1e3
        return await self._connection.ask(kind, fields, timeout_s, payload)

    async def _open(self) -> None:
        """OSError or StoreUnavailable when that fails for now, RequestRefused when for good."""
        loop = asyncio.get_running_loop()
        connection = _Connection(self._lost, self._silence_s)
        address = self._address
        if address.path:
            opening: Any = loop.create_unix_connection(lambda: connection, address.path)
        else:
            opening = loop.create_connection(lambda: connection, address.host, address.port, ssl=self._tls)
        try:
            await asyncio.wait_for(opening, self._connect_timeout_s)
        except asyncio.TimeoutError as error:
            raise StoreUnavailable(f"no answer from {address}") from error
        hello = (m.PROTOCOL_VERSION, self._client_name, ["tcp"], self._token)
        outcome, _ = await connection.ask(m.Hello, hello, self._connect_timeout_s)
        if isinstance(outcome, m.HelloReply) and not self._closed:
            self._connection = connection
            return
        connection.close("no session")
        if isinstance(outcome, m.ErrorReply):
            raise refusal(outcome)
        if outcome is Status.UNAVAILABLE:
            raise ungreeted("the store closed the connection", is_closed=True)
        raise ungreeted("no answer to the greeting in time", is_closed=False)

    def _lost(self, connection: _Connection, reason: str) -> None:
        if connection is not self._connection:
            return
        self._connection = None
        self.last_error = reason
        if not self._closed:
            logger.warning("lost store %s: %s", self._address, reason)
            self._look_for_store()

    def _look_for_store(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._keep_trying())

    async def _keep_trying(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._closed:
            try:
                await self._open()
                logger.info("connected to store %s", self._address)
                return
            except RequestRefused as error:
                logger.error("store %s refuses us: %s", self._address, error)
                self.last_error = str(error)
                pause_s = REFUSED_PAUSE_S
            except (OSError, StoreUnavailable) as error:
                self.last_error = str(error)
                pause_s = min(pause_s * 2, LONGEST_PAUSE_S)
            await asyncio.sleep(pause_s * random.uniform(0.7, 1.3))


def _settle(pending: _Pending, outcome: Outcome) -> None:
    if not pending.future.done():
        pending.future.set_result(outcome)
