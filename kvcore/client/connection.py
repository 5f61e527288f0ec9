"""One socket to the store, shared by any number of threads, without a thread of its own.

Leader and followers: a caller that waits becomes the reader when nobody else is, receives frames until its
own answer is complete (payload goes straight into the memory of whoever asked for it), then hands the role
to another waiting caller. A caller on its own therefore never pays for a thread switch. Senders take turns,
and one whose bytes are not taken reads in the meantime: a store that waits for us to drain its answers can
not lock up with us.
"""

import contextlib
import math
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence

from kvcore.client.sender import IOV_MAX, Sender
from kvcore.client.silence import Silence
from kvcore.client.tls import TlsSocket
from kvcore.errors import DeadlineExceeded, StoreUnavailable
from kvcore.layout import first_bytes
from kvcore.transport.channel import Call, Moved, Outcome, Place
from kvcore.transport.checksums import LARGE_READ_BYTES, PIECE_BYTES, LateSums
from kvcore.wire.codec import Frame, encode_frame, reply_decoder
from kvcore.wire.messages import ErrorReply, Hello, HelloReply, Message, ReadReply, Reply, Status
from kvcore.wire.receiver import FrameReceiver
from kvcore.wire.session import ClientSession, refusal, ungreeted

# A blocking receive returns at least this often to look at the clock.
TICK_S, TICK_MS = 0.25, 250
# How long a sender sleeps when somebody else is the reader and may leave at any time.
SENDER_TICK_MS = 10
EAGER_S = 50e-6
# Unanswered requests nobody waits for (Release, Abort) before their answers are drained on the way.
MAX_FORGOTTEN = 32
FOREVER = float("inf")


class Connection:
    """Implements Channel. `on_broken(error)` is called once, by the thread that finds the connection broken.

    `silence_s`: when a deadline passes and the store has sent nothing for that long although it was due, the
    connection is given up. A deadline that passes in the middle of an answer's payload also ends the
    connection: that is the only way to give the buffers back.
    """

    def __init__(
        self,
        sock: socket.socket | TlsSocket,
        on_broken: Callable[[Exception], None],
        *,
        silence_s: float = 1.0,
    ) -> None:
        self.max_payload_bytes = 0
        self.max_keys = 1
        self._socket = sock
        self._on_broken = on_broken
        self._session: ClientSession[Call] = ClientSession()
        self._decoder = reply_decoder()
        self._receiver: FrameReceiver[Reply] = FrameReceiver(self._decoder, self._on_frame, self._on_end)
        # Guards the session, the calls and the roles; never held while sending, receiving or waiting.
        self._lock = threading.Lock()
        self._sender = Sender(sock, self._wait_writable, patience_s=silence_s)
        self._reading = False
        self._parked: list[Call] = []
        self._current: Call | None = None
        self._error: Exception | None = None
        self._reported = False
        self._receive_timeout_ms = 0
        self._silence = Silence(silence_s, time.monotonic())

    @property
    def broken(self) -> bool:
        """Whether this end knows that the connection is of no more use."""
        return self._error is not None

    def still_open(self) -> bool:
        try:
            poller = select.poll()
            poller.register(self._socket, select.POLLRDHUP)
            hung_up = bool(poller.poll(0))
        except ValueError:
            hung_up = True
        # Last, because a descriptor is only closed (and perhaps reused) after this has been set.
        return not hung_up and self._error is None

    @property
    def num_pending(self) -> int:
        return self._session.num_pending

    def greet(self, hello: tuple[object, ...], deadline: float) -> HelloReply:
        """Opens the session; `hello` are the fields of Hello behind the id.

        RequestRefused: the store does not want us. StoreUnavailable: there was no (sensible) answer.
        """
        outcome = self.ask(Hello, hello, deadline)
        if isinstance(outcome, HelloReply):
            self.max_payload_bytes = self._decoder.max_payload_bytes = outcome.max_payload_bytes
            self.max_keys = outcome.max_keys
            return outcome
        self.close()
        if isinstance(outcome, ErrorReply):
            raise refusal(outcome)
        reason = str(self._error or "no answer to the greeting in time")
        raise ungreeted(reason, isinstance(self._error, ConnectionError))

    def ask(
        self,
        kind: type[Message],
        fields: tuple[object, ...],
        deadline: float,
        *,
        place: Place | None = None,
        moved: Moved | None = None,
    ) -> Outcome:
        call = Call(place, moved)
        self._begin(call, kind)
        if call.outcome is None:
            self._send(call, kind, fields, (), None, max(0.0, deadline - call.sent_at))
        return self.wait(call, deadline)

    def start(
        self,
        kind: type[Message],
        fields: tuple[object, ...],
        *,
        payload: Sequence[memoryview] = (),
        sums: LateSums | None = None,
        place: Place | None = None,
        moved: Moved | None = None,
        stall_s: float = 5.0,
        wait_s: float = 0.0,
    ) -> Call:
        call = Call(place, moved, wait_s)
        self._begin(call, kind)
        if call.outcome is None:
            self._send(call, kind, fields, payload, sums, stall_s)
        return call

    def forget(self, kind: type[Message], fields: tuple[object, ...]) -> None:
        call = Call()
        call.abandoned = True
        self._begin(call, kind)
        if call.outcome is None:
            self._send(call, kind, fields, (), None, stall_s=1.0)
            if self._session.num_pending > MAX_FORGOTTEN:
                self.poll(call)

    def wait(self, call: Call, deadline: float) -> Outcome:
        while call.outcome is None:
            with self._lock:
                if call.outcome is not None:
                    break
                leads = not self._reading
                if leads:
                    self._reading = True
                else:
                    gate = call.gate = threading.Lock()
                    gate.acquire()
                    self._parked.append(call)
            if leads:
                try:
                    self._read_until(call, deadline)
                finally:
                    self._leave()
            else:
                gate.acquire(timeout=min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX))
                self._unpark(call)
            if call.outcome is None and time.monotonic() >= deadline:
                self._expire(call)
        return call.outcome

    def poll(self, call: Call) -> bool:
        with self._lock:
            if call.outcome is not None or self._reading:
                return call.outcome is not None
            self._reading = True
        try:
            while call.outcome is None and self._error is None and self._receive(socket.MSG_DONTWAIT):
                pass
        finally:
            self._leave()
        return call.outcome is not None

    def close(self) -> None:
        """Ends the connection; what is in flight ends as UNAVAILABLE. The store sees it at once."""
        self._break(StoreUnavailable("closed by its owner"))

    def abandon_after_fork(self) -> None:
        """Lets go of the socket in a child process, without a word on the wire: the parent still uses it."""
        self._error = StoreUnavailable("this process was forked")
        self._socket.close()

    # ---- sending ---------------------------------------------------------------------------------------

    def _begin(self, call: Call, kind: type[Message]) -> None:
        with self._lock:
            if self._error is not None:
                call.outcome = Status.UNAVAILABLE
                return
            call.sent_at = call.asked_at = time.monotonic()
            call.request_id = self._session.start(kind, call)

    def _send(
        self,
        call: Call,
        kind: type[Message],
        fields: tuple[object, ...],
        payload: Sequence[memoryview],
        sums: LateSums | None,
        stall_s: float,
    ) -> None:
        payload_bytes = sum(map(len, payload)) + (sums.packed_bytes if sums else 0) if payload else 0
        head = encode_frame(kind(call.request_id, *fields), payload_bytes)
        try:
            if not self._sender.send(head, payload, sums, stall_s):
                self._withdraw(call)
            if payload:
                call.asked_at = time.monotonic()
        except (DeadlineExceeded, OSError) as error:
            self._break(error)
        if self._error is not None:
            self._close_socket_if_idle()

    def _wait_writable(self, deadline: float) -> None:
        """ConnectionError when the connection is found broken."""
        with self._lock:
            leads, self._reading = not self._reading, True
        try:
            poller = select.poll()
            poller.register(self._socket, select.POLLOUT | select.POLLIN if leads else select.POLLOUT)
            left_ms = max(1, int((deadline - time.monotonic()) * 1000))
            found = sum(mask for _, mask in poller.poll(left_ms if leads else min(left_ms, SENDER_TICK_MS)))
            if found & select.POLLOUT:
                self._silence.heard(time.monotonic())  # it has taken bytes of ours
            if leads and found & ~select.POLLOUT:
                self._receive(socket.MSG_DONTWAIT)
        finally:
            if leads:
                self._leave()
        if self._error is not None:
            raise ConnectionAbortedError("the connection broke in the middle of a request")

    def _withdraw(self, call: Call) -> None:
        with self._lock:
            if self._error is None and call.outcome is None:
                self._session.cancel(call.request_id)
                call.outcome = Status.TIMED_OUT

    # ---- receiving: only by whoever holds the role (_reading) ------------------------------------------

    def _read_until(self, call: Call, deadline: float) -> None:
        self._read_eagerly(call)
        while call.outcome is None and self._error is None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return
            timeout_ms = TICK_MS if left_s >= TICK_S else math.ceil(left_s * 1000)
            if timeout_ms != self._receive_timeout_ms:
                timeval = struct.pack("ll", timeout_ms // 1000, timeout_ms % 1000 * 1000)
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
                self._receive_timeout_ms = timeout_ms
            self._receive()

    def _read_eagerly(self, call: Call) -> None:
        """Answers mostly come sooner than a thread falls asleep and wakes; others may have the core."""
        end = time.monotonic() + EAGER_S
        while call.outcome is None and self._error is None and not self._receiver.in_payload:
            if not self._receive(socket.MSG_DONTWAIT):
                if time.monotonic() >= end:
                    return
                os.sched_yield()

    def _receive(self, flags: int = 0) -> bool:
        """One receive; False when there was nothing, or nothing ever will be."""
        views = self._receiver.views()
        try:
            if not self._receiver.in_payload:
                size = self._socket.recv_into(views[0], 0, flags)
            else:
                if self._receiver.on_moved is not None:
                    views = first_bytes(views, PIECE_BYTES)
                flags |= socket.MSG_WAITALL
                if len(views) == 1:
                    size = self._socket.recv_into(views[0], 0, flags)
                else:
                    size = self._socket.recvmsg_into(views[:IOV_MAX], 0, flags)[0]
            if size == 0:
                raise ConnectionResetError("the store closed the connection")
            self._silence.heard(time.monotonic())
            self._receiver.received(size)
        except BlockingIOError:
            return False
        except Exception as error:
            # Whatever it was, we have lost step with the stream.
            self._break(error)
            return False
        return True

    def _on_frame(self, frame: Frame[Reply]) -> Sequence[memoryview] | None:
        with self._lock:
            call = self._session.receive(frame)
            call.reply = frame.message
            self._current = call
            self._receiver.on_moved = None
            if call.abandoned:
                return None
            if frame.payload_bytes > LARGE_READ_BYTES:
                self._receiver.on_moved = call.moved
        if call.place is not None and isinstance(frame.message, ReadReply):
            return call.place(frame.message, frame.payload_bytes)
        return None

    def _on_end(self, frame: Frame[Reply]) -> None:
        with self._lock:
            call, self._current = self._current, None
            if call is not None and call.outcome is None:
                call.outcome = call.reply
                self._wake(call)

    def _leave(self) -> None:
        """Hands the role over, or, on a broken connection, ends everything that waits."""
        with self._lock:
            self._reading = False
            error = self._error
            if error is None:
                self._wake_next()
                return
            orphans = self._session.close()
            if self._current is not None:
                orphans.append(self._current)
                self._current = None
            for call in orphans:
                if call.outcome is None:
                    call.outcome = Status.UNAVAILABLE
                self._wake(call)
            is_news, self._reported = not self._reported, True
        self._close_socket_if_idle()
        if is_news:
            self._on_broken(error)

    # ---- ends ------------------------------------------------------------------------------------------

    def _expire(self, call: Call) -> None:
        with self._lock:
            if call.outcome is not None:
                return
            in_payload = call is self._current
            if not in_payload:
                call.abandoned = True
                call.outcome = Status.TIMED_OUT
                if not self._reading:
                    self._wake_next()
            is_silent = self._silence.missed(time.monotonic(), call.asked_at + call.wait_s)
        if in_payload:
            self._break(DeadlineExceeded("a deadline passed in the middle of an answer"))
            # Whoever is receiving into this call's memory has been cut off and is about to leave.
            self.wait(call, FOREVER)
            call.outcome = Status.TIMED_OUT
        elif is_silent:
            self._break(DeadlineExceeded(f"the store has been silent for {self._silence.limit_s:.1f} s"))

    def _break(self, error: Exception) -> None:
        with self._lock:
            if self._error is None:
                self._error = error
            leads, self._reading = not self._reading, True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if leads:
            self._leave()

    def _close_socket_if_idle(self) -> None:
        # A descriptor closed under another thread's system call might by then be somebody else's.
        if self._sender.lock.acquire(blocking=False):
            try:
                with self._lock:
                    if not self._reading:
                        self._socket.close()
            finally:
                self._sender.lock.release()

    def _wake(self, call: Call) -> None:
        gate, call.gate = call.gate, None
        if gate is not None:
            self._parked.remove(call)
            gate.release()

    def _wake_next(self) -> None:
        if self._parked:
            self._wake(self._parked[0])

    def _unpark(self, call: Call) -> None:
        with self._lock:
            if call.gate is not None:
                call.gate = None
                self._parked.remove(call)
