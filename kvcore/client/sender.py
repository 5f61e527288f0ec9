"""Requests out: whole frames, one after the other, of any number of threads."""

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from kvcore.client.tls import TlsSocket
from kvcore.errors import DeadlineExceeded
from kvcore.transport.checksums import PIECE_BYTES, RunningSums

IOV_MAX = 1024
NO_WAIT = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL


class Sender:
    """`lock` is held by whoever sends. `wait_writable(deadline)` returns when it may be worth to try again.
    Half a frame cannot be taken back: once one has begun, its sender has `patience_s` at least."""

    def __init__(
        self, sock: socket.socket | TlsSocket, wait_writable: Callable[[float], None], *, patience_s: float
    ) -> None:
        self.lock = threading.Lock()
        self._socket = sock
        self._wait_writable = wait_writable
        self._patience_s = patience_s

    def send(
        self, head: bytes, payload: Sequence[memoryview], sums: RunningSums | None, stall_s: float
    ) -> bool:
        """False: nothing was sent in time. DeadlineExceeded: half a frame was, and then nothing more."""
        lock = self.lock
        if not lock.acquire(False) and not lock.acquire(timeout=min(stall_s, threading.TIMEOUT_MAX)):
            return False
        try:
            if not payload:
                return self._send_small(head, stall_s)
            if sums is None:
                return self._send_all([memoryview(head), *payload], stall_s, begun=False)
            begun = False
            for buffers in _pieces(head, payload, sums):
                if not self._send_all(buffers, stall_s, begun):
                    return False
                begun = True
            return True
        finally:
            lock.release()

    def _send_small(self, head: bytes, stall_s: float) -> bool:
        """What nearly every request is: one call, without the bookkeeping of many buffers."""
        view = memoryview(head)
        try:
            size = self._socket.send(view, NO_WAIT)
        except BlockingIOError:
            size = 0
        return size == len(head) or self._send_all([view[size:]], stall_s, begun=size > 0)

    def _send_all(self, buffers: list[memoryview], stall_s: float, begun: bool) -> bool:
        first, deadline = 0, 0.0
        while first < len(buffers):
            try:
                if len(buffers) - first == 1:
                    size = self._socket.send(buffers[first], NO_WAIT)
                else:
                    size = self._socket.sendmsg(buffers[first : first + IOV_MAX], (), NO_WAIT)
            except BlockingIOError:
                now = time.monotonic()
                if not deadline:
                    deadline = now + (max(stall_s, self._patience_s) if begun else stall_s)
                if now >= deadline:
                    if not begun:
                        return False
                    raise DeadlineExceeded("the store stopped taking a request half way") from None
                self._wait_writable(deadline)
                continue
            begun, deadline = True, 0.0
            while first < len(buffers) and size >= len(buffers[first]):
                size -= len(buffers[first])
                first += 1
            if size:
                buffers[first] = buffers[first][size:]
        return True


def _pieces(head: bytes, payload: Sequence[memoryview], sums: RunningSums) -> Iterator[list[memoryview]]:
    """Each is hashed just before it is sent; the last one brings the sums."""
    buffers, size_bytes = [memoryview(head)], 0
    for view in payload:
        for offset in range(0, len(view), PIECE_BYTES):
            if size_bytes >= PIECE_BYTES:
                yield buffers
                buffers, size_bytes = [], 0
            piece = view[offset : offset + PIECE_BYTES]
            sums.add(len(piece))
            buffers.append(piece)
            size_bytes += len(piece)
    yield [*buffers, memoryview(sums.packed())]
