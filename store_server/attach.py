"""Where clients of this host fetch the pool: they send their nonce, get the descriptor, and stay connected.

The kernel tears down a process's mappings before it closes its files, so the end of such a connection proves
that the mapping is gone: only then may extents be reused that a vanished client was writing to.
"""

import asyncio
import logging
import secrets
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path

from store_server.core.objects import Session

logger = logging.getLogger(__name__)

NONCE_BYTES = 16
_NONCE_TIMEOUT_S = 10.0
_ACCEPT_PAUSE_S = 1.0


class AttachPoint:
    """A Unix socket at `path`. `access_ended(session)` is called when a client has provably unmapped.

    Raw sockets and readiness callbacks: transports cannot send descriptors."""

    def __init__(
        self,
        path: Path,
        pool_fd: int,
        access_ended: Callable[[Session], None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.path = path
        self._pool_fd = pool_fd
        self._access_ended = access_ended
        self._loop = loop
        self._offers: dict[bytes, Session] = {}
        self._clients: dict[socket.socket, Session | None] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._listener.bind(str(path))
        self._listener.listen(128)
        self._listen()

    def offer(self, session: Session) -> bytes:
        """A nonce that attaches `session` once."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._offers[nonce] = session
        return nonce

    def withdraw(self, session: Session) -> None:
        """The session has ended; what it has mapped already stays known."""
        self._offers = {nonce: other for nonce, other in self._offers.items() if other is not session}

    def close(self) -> None:
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for client in list(self._clients):
            self._drop(client)

    def _listen(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            logger.error("no client can attach the pool: %s (see ulimit -n)", error.strerror)
            # The connection stays in the queue and would be reported again at once.
            self._loop.remove_reader(self._listener)
            self._loop.call_later(_ACCEPT_PAUSE_S, self._listen)
            return
        client.setblocking(False)
        self._clients[client] = None
        self._loop.add_reader(client, self._readable, client)
        self._loop.call_later(_NONCE_TIMEOUT_S, partial(self._drop_silent, client))

    def _readable(self, client: socket.socket) -> None:
        try:
            data = client.recv(NONCE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        session = self._offers.pop(data, None)
        if session is None or self._clients[client] is not None:
            self._drop(client)
            return
        # Mapped from before the descriptor is out: from now on the client may write to the pool.
        session.is_mapped = True
        self._clients[client] = session
        try:
            socket.send_fds(client, [b"\0"], [self._pool_fd])
        except OSError as error:
            logger.warning("a client did not take the pool: %s", error.strerror)
            self._drop(client)

    def _drop_silent(self, client: socket.socket) -> None:
        if client in self._clients and self._clients[client] is None:
            self._drop(client)

    def _drop(self, client: socket.socket) -> None:
        session = self._clients.pop(client)
        self._loop.remove_reader(client)
        client.close()
        if session is not None:
            session.is_mapped = False
            self._access_ended(session)
