"""Keeps a client linked to its store: connects, reconnects in the background, and says at once when there is
no store to ask. It is the circuit breaker: without a link every call is a miss that costs microseconds.
"""

import logging
import os
import random
import socket
import ssl
import threading
import time

import msgspec

from kvcore.client.address import Address, open_socket
from kvcore.client.connection import Connection
from kvcore.client.counters import CONNECT_FAILURES_TOTAL, CONNECTIONS_LOST_TOTAL, CONNECTS_TOTAL, Counters
from kvcore.client.tls import TlsSocket
from kvcore.errors import RequestRefused, StoreUnavailable
from kvcore.transport.choose import Means, Plane, choose_plane
from kvcore.transport.host import host_id
from kvcore.transport.parts import Reservation
from kvcore.transport.rdma_host import RdmaHost
from kvcore.transport.tcp import TcpTransport
from kvcore.wire.messages import PROTOCOL_VERSION, HelloReply

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT_MS = 5000.0
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0
# A store that refuses us (token, version) is asked again, but rarely: only a person can change that.
REFUSED_PAUSE_S = 30.0


class LinkOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a client connects; StoreClient says what each of them means."""

    address: Address
    token: str
    planes: list[str]
    timeout_ms: float
    connect_timeout_ms: float
    silence_ms: float
    client_name: str
    checksums: bool
    verify_shm: bool
    tls: ssl.SSLContext | None
    rdma: RdmaHost | str


class Link:
    """One living connection with everything that dies with it."""

    def __init__(
        self,
        connection: Connection,
        plane: Plane,
        plane_reason: str,
        reservations: dict[bytes, Reservation],
        server_id: str,
    ) -> None:
        self.connection = connection
        self.plane = plane
        self.plane_reason = plane_reason
        self.reservations = reservations
        self.server_id = server_id


def _encrypted(sock: socket.socket, context: ssl.SSLContext, host: str, timeout_s: float) -> TlsSocket:
    try:
        return TlsSocket(sock, context, host, timeout_s)
    except OSError:
        sock.close()
        raise


class LinkKeeper:
    """`current()` is the hot path; a thread exists only while there is no link."""

    def __init__(self, options: LinkOptions, counters: Counters) -> None:
        self.options = options
        self.counters = counters
        self.last_error = ""
        self._link: Link | None = None
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._attempted = threading.Event()
        self._refusal: RequestRefused | None = None
        self.rdma: RdmaHost | str = options.rdma
        """Devices and registered memory, which outlive links; or why there are none."""

    def current(self) -> Link | None:
        """None: there is no store to ask right now."""
        if os.getpid() != self._pid:
            self._start_over_after_fork()
        return self._link

    @property
    def state(self) -> str:
        """ "linked", "connecting" or "closed"."""
        if self._closed.is_set():
            return "closed"
        return "linked" if self._link is not None else "connecting"

    def first_attempt(self) -> None:
        """Waits until the first attempt to connect has ended. RequestRefused when the store refused us."""
        self._attempted.wait()
        if self._refusal is not None:
            raise self._refusal

    def reconnect(self) -> None:
        """Makes sure that somebody is trying to connect."""
        with self._lock:
            if self._link is None and self._thread is None and not self._closed.is_set():
                thread = threading.Thread(target=self._keep_trying, name="mooncake-reconnect", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    # The interpreter is shutting down, or out of threads: the caller still gets its miss.
                    self.last_error = str(error)
                    self._attempted.set()
                else:
                    self._thread = thread

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            link, self._link = self._link, None
            thread = self._thread
        if link is not None:
            link.plane.close()
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        if isinstance(self.rdma, RdmaHost):
            self.rdma.close()

    def _open(self) -> Link:
        """OSError or StoreUnavailable when that fails for now, RequestRefused when for good."""
        options = self.options
        timeout_s = options.connect_timeout_ms / 1e3
        deadline = time.monotonic() + timeout_s
        plain = open_socket(options.address, timeout_s)
        sock = _encrypted(plain, options.tls, options.address.host, timeout_s) if options.tls else plain
        connection, reply = self._greet(sock, deadline)
        shm = reply.shm if self._offered()[:1] != ["tcp"] else None
        if shm is not None and shm.unix_path and not options.tls and not options.address.path:
            try:
                nearer = open_socket(Address(path=shm.unix_path), timeout_s)
                distant, (connection, reply) = connection, self._greet(nearer, deadline)
            except (OSError, StoreUnavailable, RequestRefused) as error:
                logger.info("messages stay on TCP, %s cannot be used: %s", shm.unix_path, error)
            else:
                distant.close()
        reservations: dict[bytes, Reservation] = {}
        inline = TcpTransport(
            connection,
            reservations,
            timeout_s=options.timeout_ms / 1e3,
            checksums=options.checksums,
            verify=options.checksums,
            on_read=self.counters.read,
            on_write=self.counters.written,
        )
        means = Means(inline, reply, timeout_s, options.verify_shm, self.rdma)
        plane, reason = choose_plane(options.planes, means)
        return Link(connection, plane, reason, reservations, reply.server_id)

    def _greet(self, sock: socket.socket | TlsSocket, deadline: float) -> tuple[Connection, HelloReply]:
        options = self.options
        connection = Connection(sock, self._lost, silence_s=options.silence_ms / 1e3)
        hello = (PROTOCOL_VERSION, options.client_name, self._offered(), options.token, host_id())
        return connection, connection.greet(hello, deadline)

    def _offered(self) -> list[str]:
        """Planes that this host could use."""
        has_rdma = isinstance(self.rdma, RdmaHost)
        return [plane for plane in self.options.planes if plane != "rdma" or has_rdma]

    def _install(self, link: Link) -> None:
        with self._lock:
            usable = not self._closed.is_set() and not link.connection.broken
            if usable:
                self._link, self._thread = link, None
            self._refusal = None
        self._attempted.set()
        if not usable:
            link.plane.close()
            raise StoreUnavailable("the connection broke at once")
        self.counters.add(CONNECTS_TOTAL)
        logger.info(
            "connected to store %s (%s) over %s: %s",
            self.options.address, link.server_id, link.plane.name, link.plane_reason,
        )  # fmt: skip

    def _lost(self, error: Exception) -> None:
        """Called by the connection, from whichever thread found it broken."""
        with self._lock:
            link = self._link
            if link is None or not link.connection.broken:
                return
            self._link = None
            self.last_error = str(error)
        self.counters.add(CONNECTIONS_LOST_TOTAL)
        if not self._closed.is_set():
            logger.warning("lost store %s: %s; its blocks are misses for now", self.options.address, error)
        link.plane.let_go()
        self.reconnect()

    def _failed(self, error: Exception) -> None:
        self.last_error = str(error)
        self.counters.add(CONNECT_FAILURES_TOTAL)
        self._attempted.set()

    def _keep_trying(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._closed.is_set():
            try:
                self._install(self._open())
                return
            except RequestRefused as error:
                self._refusal = error
                self._failed(error)
                logger.error("store %s refuses us: %s", self.options.address, error)
                pause_s = REFUSED_PAUSE_S
            except (OSError, StoreUnavailable) as error:
                if not self.last_error:
                    logger.warning("no store at %s yet: %s", self.options.address, error)
                self._failed(error)
                pause_s = min(pause_s * 2, LONGEST_PAUSE_S)
            # Many clients lose one store at the same moment; they should not come back in step.
            self._closed.wait(pause_s * random.uniform(0.7, 1.3))

    def _start_over_after_fork(self) -> None:
        """The connection belongs to the parent. Locks are made anew: one may have been held at the fork."""
        link, self._link = self._link, None
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._thread = None
        self.counters.start_over_after_fork()
        if isinstance(self.rdma, RdmaHost):
            self.rdma.leave_to_parent()
            self.rdma = "this process was forked from the one that has the devices open"
        if link is not None:
            link.plane.leave_to_parent()
            link.connection.abandon_after_fork()
        if not self._closed.is_set():
            self.reconnect()
