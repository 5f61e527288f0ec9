"""Stand-ins for engines that publish KV events: no more than that, with numbers and gaps as told."""

import time
from collections.abc import Iterable, Sequence
from types import TracebackType

import zmq
from storebench.processes import SystemFailed

from kvcore.wire.events import Event, encode_batch, published_frames

_SUBSCRIBE_TIMEOUT_S = 30.0


class Engines:
    """As many publishers, without replay endpoints."""

    def __init__(self, count: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        self.next_seq = [0] * count
        for _ in range(count):
            # As PUB, but subscriptions can be seen: what is published before one arrives is lost.
            socket = self._context.socket(zmq.XPUB)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.bind("tcp://127.0.0.1:*")
            self._sockets.append(socket)

    def __enter__(self) -> "Engines":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._context.destroy(linger=0)

    @property
    def endpoints(self) -> Sequence[str]:
        return [socket.getsockopt_string(zmq.LAST_ENDPOINT) for socket in self._sockets]

    def wait_heard(self) -> None:
        """Until each has a subscriber that it had not before."""
        deadline_s = time.monotonic() + _SUBSCRIBE_TIMEOUT_S
        for socket in self._sockets:
            subscribed = False
            while not subscribed:
                if not socket.poll(int(max(0.0, deadline_s - time.monotonic()) * 1000)):
                    raise SystemFailed("it did not subscribe to all engines' events")
                subscribed = socket.recv() == b"\x01"

    def publish(self, engine: int, payload: bytes, seq: int | None = None) -> None:
        """`seq`: not the next number, which is then counted on from it."""
        number = self.next_seq[engine] if seq is None else seq
        self.next_seq[engine] = number + 1
        self._sockets[engine].send_multipart(published_frames("kv", number, payload))

    def publish_events(self, engine: int, events: Sequence[Event], seq: int | None = None) -> None:
        self.publish(engine, encode_batch(1.0, events, 0), seq)

    def publish_in_turn(self, payloads: Sequence[Iterable[bytes]]) -> None:
        """`payloads`: of each engine."""
        for batches in zip(*payloads, strict=True):
            for engine, payload in enumerate(batches):
                self.publish(engine, payload)
