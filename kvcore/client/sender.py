"""Requests out: whole frames, one after the other, of any number of threads."""

import socket
import threading
import time
from collections.abc import Callable, Sequence

from kvcore.client.tls import TlsSocket
from kvcore.errors import DeadlineExceeded
from kvcore.transport.checksums import LateSums

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

    def send(self, head: bytes, payload: Sequence[memoryview], sums: LateSums | None, stall_s: float) -> bool:
        """False: nothing was sent in time. DeadlineExceeded: half a frame was, and then nothing more."""
        lock = self.lock
        if not lock.acquire(False) and not lock.acquire(timeout=min(stall_s, threading.TIMEOUT_MAX)):
            return False
        try:
            if not payload:
                return self._send_small(head, stall_s)
            if sums is None:
                return self._send_all([memoryview(head), *payload], stall_s, begun=False)
            sums.begin()
            try:
                return self._send_all([memoryview(head), *payload], stall_s, begun=False) and self._send_all(
                    [memoryview(sums.packed())], stall_s, begun=True
                )
            finally:
                sums.end()
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
