"""Makes and ends connections to peers. It waits for answers, so it has threads of its own: the worker never
does."""

import itertools
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvcore.client.address import parse_address
from kvcore.errors import ConfigError, DeadlineExceeded, KVError, RequestRefused, StoreUnavailable
from kvcore.transport.endpoints import EndpointKey
from kvcore.transport.engine.batch import Segment
from kvcore.transport.engine.cards import Card
from kvcore.transport.engine.messages import (
    REPLIES,
    Connect,
    Connected,
    Describe,
    Description,
    Done,
    Greet,
    Link,
    Refused,
    Reply,
    Request,
    Retire,
)
from kvcore.transport.engine.rdma_path import RdmaPath
from kvcore.transport.engine.tcp_path import TCP, TcpPath
from kvcore.transport.slices import Run
from kvcore.transport.topology import Cards
from kvcore.transport.verbs import RdmaUnavailable

_THREADS = 8
R = TypeVar("R", bound=Reply)
T = TypeVar("T")
Path = RdmaPath | TcpPath


class Unreachable(StoreUnavailable):
    """The peer itself does not answer, so that no path of it will."""


class Connector:
    """`on_tcp_end` as in TcpPath. All methods may be called from any thread."""

    def __init__(
        self,
        cards: Mapping[str, Card],
        *,
        token: str,
        timeout_s: float,
        on_tcp_end: Callable[[TcpPath, Run, str], None],
    ) -> None:
        self._cards = cards
        self._token = token
        self._timeout_s = timeout_s
        self._on_tcp_end = on_tcp_end
        self._lock = threading.Lock()
        self._peers: dict[str, _Peer] = {}
        self._is_closed = False
        self._serials = itertools.count(1)
        self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="transfer-connector")

    def describe(self, address: str) -> Segment:
        """Blocks. Unreachable, or RequestRefused for a wrong token."""
        reply = self._peer(address).ask(Describe(), Description)
        matrix = {place: Cards(*lists) for place, lists in reply.matrix.items()}
        return Segment(address, tuple(reply.memories), matrix, reply.takes_tcp)

    def connect(self, key: EndpointKey, then: Callable[[Path | KVError], object]) -> None:
        """`then` is called by a thread of ours."""
        self._submit(lambda: self._connect(key), then)

    def retire(self, path: Path, then: Callable[[KVError | None], object]) -> None:
        """After `path.close()`: until the peer has destroyed its end, packets may still arrive there."""
        self._submit(lambda: self._retire(path), then)

    def close(self) -> None:
        """Whatever was asked for before has been answered when it returns."""
        with self._lock:
            self._is_closed = True
            peers = list(self._peers.values())
        for peer in peers:
            peer.cut()
        self._executor.shutdown(wait=True)
        for peer in peers:
            peer.close()

    def _submit(self, work: Callable[[], T], then: Callable[[T | KVError], object]) -> None:
        with self._lock:
            if not self._is_closed:
                self._executor.submit(_run, work, then)
                return
        then(Unreachable("the engine is closed"))

    def _connect(self, key: EndpointKey) -> Path:
        if key.device == TCP:
            return TcpPath(key, _greeted(key.peer, self._token, self._timeout_s), self._on_tcp_end)
        card = self._cards[key.device]
        peer, number = self._peer(key.peer), 0
        pair = card.active_pair()
        try:
            reply = peer.ask(Connect(key.peer_device, pair.address), Connected)
            number = reply.address.number
            card.connect(pair, reply.address)
            return RdmaPath(key, card, pair, number, next(self._serials))
        except KVError:
            pair.close()
            if number:
                peer.ask_if_open(Retire(number))
            raise

    def _retire(self, path: Path) -> None:
        if isinstance(path, RdmaPath):
            self._peer(path.key.peer).ask_if_open(Retire(path.peer_number))

    def _peer(self, address: str) -> "_Peer":
        with self._lock:
            return self._peers.setdefault(address, _Peer(address, self._token, self._timeout_s))


def _run(work: Callable[[], T], then: Callable[[T | KVError], object]) -> None:
    try:
        result: T | KVError = work()
    except KVError as error:
        result = error
    then(result)


class _Peer:
    """Our control connection to one peer, made when it is needed. The peer's ends of our queue pairs live as
    long as it does."""

    def __init__(self, address: str, token: str, timeout_s: float) -> None:
        self._address = address
        self._token = token
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._link: Link | None = None

    def ask(self, request: Request, kind: type[R]) -> R:
        with self._lock:
            if self._link is None:
                self._link = _greeted(self._address, self._token, self._timeout_s)
            reply = self._exchange(self._link, request)
        if isinstance(reply, Refused):
            raise RdmaUnavailable(f"{self._address}: {reply.reason}")
        if not isinstance(reply, kind):
            raise Unreachable(f"{self._address} answers with a {type(reply).__name__}")
        return reply

    def ask_if_open(self, request: Request) -> None:
        """Without a connection there is nothing at the peer that it could be about."""
        with self._lock:
            if self._link is not None:
                self._exchange(self._link, request)

    def cut(self) -> None:
        """Ends a wait for its answer."""
        link = self._link
        if link is not None:
            link.cut()

    def close(self) -> None:
        with self._lock:
            if self._link is not None:
                self._link.close()
                self._link = None

    def _exchange(self, link: Link, request: Request) -> Reply:
        try:
            link.send(request)
            return link.receive(REPLIES)[0]
        except KVError as error:
            link.close()
            self._link = None
            raise Unreachable(f"{self._address}: {error}") from error


def _greeted(address: str, token: str, timeout_s: float) -> Link:
    parsed = parse_address(address)
    if not parsed.host or parsed.is_tls:
        raise ConfigError(f"{address!r}: an engine is at HOST:PORT")
    try:
        link = Link.connect(parsed.host, parsed.port, timeout_s)
    except (StoreUnavailable, DeadlineExceeded) as error:
        raise Unreachable(str(error)) from error
    try:
        link.send(Greet(token))
        reply, _ = link.receive(REPLIES)
    except KVError as error:
        link.close()
        raise Unreachable(f"{address}: {error}") from error
    if not isinstance(reply, Done):
        link.close()
        reason = reply.reason if isinstance(reply, Refused) else "it is no transfer engine"
        raise RequestRefused(0, f"{address}: {reason}")
    return link
