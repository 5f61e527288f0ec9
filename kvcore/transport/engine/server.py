"""The passive side of an engine: tells peers what is registered, makes the queue pairs they ask for, and
carries bytes for those that come over TCP. A thread a connection; it only waits and never computes for
long."""

import contextlib
import hmac
import logging
import socket
import threading
from collections.abc import Mapping

from kvcore.errors import KVError, RemoteProtocolError
from kvcore.transport.engine.cards import Card
from kvcore.transport.engine.memory import MemoryTable
from kvcore.transport.engine.messages import (
    REQUESTS,
    Connect,
    Connected,
    Describe,
    Description,
    Done,
    Greet,
    Link,
    ReadFrom,
    Refused,
    Request,
    Retire,
    WriteTo,
)
from kvcore.transport.topology import Matrix
from kvcore.transport.verbs import QueuePair, RdmaUnavailable

logger = logging.getLogger(__name__)

_BACKLOG = 128


class EngineServer:
    """Listens from the start. Raises OSError when the address is taken."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        token: str,
        memories: MemoryTable,
        cards: Mapping[str, Card],
        matrix: Matrix,
        takes_tcp: bool,
    ) -> None:
        self._token = token
        self._memories = memories
        self._cards = cards
        self._matrix = matrix
        self._takes_tcp = takes_tcp
        self._lock = threading.Lock()
        self._links: set[Link] = set()
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server((host, port), backlog=_BACKLOG)
        self.port: int = self._listener.getsockname()[1]
        self._acceptor = threading.Thread(target=self._accept, name="transfer-listener", daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        """Ends all connections; the queue pairs made for them are destroyed when it returns."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._acceptor.join()
        with self._lock:
            links, threads = list(self._links), list(self._threads)
        for link in links:
            link.cut()
        for thread in threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            link = Link(sock)
            thread = threading.Thread(target=self._serve, args=(link,), name="transfer-peer", daemon=True)
            with self._lock:
                self._links.add(link)
                self._threads = [*(old for old in self._threads if old.is_alive()), thread]
            thread.start()

    def _serve(self, link: Link) -> None:
        guest = _Guest(self._memories, self._cards, self._matrix, self._takes_tcp, link)
        try:
            greeting, _ = link.receive(REQUESTS)
            if not isinstance(greeting, Greet) or not hmac.compare_digest(greeting.token, self._token):
                link.send(Refused("wrong token"))
                return
            link.send(Done())
            while True:
                guest.answer()
        except RemoteProtocolError as error:
            logger.warning("a peer is cut off: %s", error)
        except KVError as error:
            logger.debug("a peer is gone: %s", error)
        finally:
            guest.close()
            link.close()
            with self._lock:
                self._links.discard(link)


class _Guest:
    """One connection, and the queue pairs that live as long as it does."""

    def __init__(
        self, memories: MemoryTable, cards: Mapping[str, Card], matrix: Matrix, takes_tcp: bool, link: Link
    ) -> None:
        self._memories = memories
        self._cards = cards
        self._matrix = matrix
        self._takes_tcp = takes_tcp
        self._link = link
        self._pairs: dict[int, QueuePair] = {}

    def answer(self) -> None:
        """One request."""
        with contextlib.ExitStack() as held:
            written: list[bool] = []

            def place(request: Request) -> memoryview | None:
                if not isinstance(request, WriteTo) or not self._takes_tcp:
                    return None
                view = held.enter_context(self._memories.using(request.address, request.size_bytes))
                written.append(view is not None)
                return view

            request, _ = self._link.receive(REQUESTS, place)
        if isinstance(request, WriteTo):
            self._link.send(Done() if written == [True] else Refused("that memory is not registered here"))
        elif isinstance(request, ReadFrom):
            self._read(request)
        elif isinstance(request, Describe):
            matrix = {place: (cards.preferred, cards.others) for place, cards in self._matrix.items()}
            self._link.send(Description(self._memories.describe(), matrix, self._takes_tcp))
        elif isinstance(request, Connect):
            self._link.send(self._connect(request))
        elif isinstance(request, Retire):
            pair = self._pairs.pop(request.number, None)
            if pair is not None:
                pair.close()
            self._link.send(Done())
        else:
            raise RemoteProtocolError("greeted twice")

    def close(self) -> None:
        for pair in self._pairs.values():
            pair.close()
        self._pairs.clear()

    def _connect(self, request: Connect) -> Connected | Refused:
        card = self._cards.get(request.card)
        if card is None:
            return Refused(f"no card {request.card} here")
        try:
            pair = card.accept(request.address)
        except RdmaUnavailable as error:
            return Refused(str(error))
        self._pairs[pair.number] = pair
        return Connected(pair.address)

    def _read(self, request: ReadFrom) -> None:
        with self._memories.using(request.address, request.size_bytes) as view:
            if view is None or not self._takes_tcp:
                self._link.send(Refused("that memory is not registered here"))
            else:
                self._link.send(Done(), view)
