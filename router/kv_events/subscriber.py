"""Follows one publisher of KV events: its live stream, and its replay after a gap.

ZMQ connects and reconnects by itself. Its descriptors are edge-triggered: after each of our own calls what
there is must be taken to the end, or nothing may wake us again.
"""

import asyncio
import logging

import zmq

from kvcore.errors import ConfigError, RemoteProtocolError
from kvcore.wire.events import parse_published, parse_replayed, replay_request
from router.core.event_feed import EventFeed, ReplayFrom
from router.kv_events.source import EventSource

logger = logging.getLogger(__name__)

# Messages taken before requests get their turn: under a millisecond of work.
_SLICE = 32
_REPLAY_TIMEOUT_S = 5.0
_RECEIVE_QUEUE_BATCHES = 100_000


class Subscriber:
    """On the event loop's thread. `start`, then `close` once."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        source: EventSource,
        feed: EventFeed,
        replay_timeout_s: float = _REPLAY_TIMEOUT_S,
    ) -> None:
        self.source = source
        self.feed = feed
        self.num_malformed = 0
        self._context = context
        self._replay_timeout_s = replay_timeout_s
        self._loop = asyncio.get_running_loop()
        self._live: zmq.Socket[bytes] | None = None
        self._dealer: zmq.Socket[bytes] | None = None
        self._generation = 0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """ConfigError when an endpoint to listen on is taken or cannot be understood."""
        live = self._context.socket(zmq.SUB)
        live.setsockopt(zmq.LINGER, 0)
        live.setsockopt(zmq.RCVHWM, _RECEIVE_QUEUE_BATCHES)
        live.setsockopt(zmq.IPV6, int("[" in self.source.endpoint))
        live.subscribe(b"")
        try:
            if self.source.endpoint.startswith("@"):
                live.bind(self.source.endpoint[1:])
            else:
                live.connect(self.source.endpoint)
        except zmq.ZMQError as error:
            live.close(linger=0)
            raise ConfigError(f"KV events from {self.source.endpoint}: {error.strerror}") from error
        self._live = live
        self._loop.add_reader(live.fileno(), self._take_live)
        self._loop.call_soon(self._take_live)
        self._replay(self.feed.connected())

    def close(self) -> None:
        """Idempotent."""
        self._end_replay()
        if self._live is not None:
            self._loop.remove_reader(self._live.fileno())
            self._live.close(linger=0)
            self._live = None

    def lost(self) -> None:
        """The publisher is down: what it held is unknown."""
        self._end_replay()
        self.feed.reset()

    def found_again(self) -> None:
        """It is back: ask what it holds."""
        self._replay(self.feed.connected())

    # ---- live -------------------------------------------------------------------------------------------

    def _take_live(self) -> None:
        for _ in range(_SLICE):
            if self._live is None:
                return
            try:
                frames = self._live.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                published = parse_published(frames)
            except RemoteProtocolError as error:
                self._malformed(error)
                continue
            if published.seq is not None:
                self._replay(self.feed.on_published(published.seq, published.payload))
        self._loop.call_soon(self._take_live)

    def _malformed(self, error: RemoteProtocolError) -> None:
        if not self.num_malformed:
            logger.warning(
                "not a KV event publisher, or one of a shape we do not know",
                extra={"endpoint": self.source.endpoint, "reason": str(error)},
            )
        self.num_malformed += 1

    # ---- replay -----------------------------------------------------------------------------------------

    def _replay(self, wanted: ReplayFrom | None) -> None:
        """Answers carry no mark of the question: each replay has a socket of its own."""
        if wanted is None:
            return
        self._end_replay()
        if not self.source.replay_endpoint:
            self.feed.on_replay_failed(wanted.generation)
            return
        dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RCVHWM, _RECEIVE_QUEUE_BATCHES)
        dealer.setsockopt(zmq.IPV6, int("[" in self.source.replay_endpoint))
        self._dealer, self._generation = dealer, wanted.generation
        try:
            dealer.connect(self.source.replay_endpoint)
            dealer.send_multipart(replay_request(wanted.first_seq), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            logger.warning("no replay", extra={"endpoint": self.source.replay_endpoint, "reason": str(error)})
            self._fail_replay()
            return
        self._loop.add_reader(dealer.fileno(), self._take_replayed, dealer)
        self._loop.call_soon(self._take_replayed, dealer)
        self._restart_timer()

    def _restart_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(self._replay_timeout_s, self._fail_replay)

    def _fail_replay(self) -> None:
        generation = self._generation
        self._end_replay()
        self.feed.on_replay_failed(generation)

    def _end_replay(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        dealer, self._dealer = self._dealer, None
        if dealer is not None:
            self._loop.remove_reader(dealer.fileno())
            dealer.close(linger=0)

    def _take_replayed(self, dealer: "zmq.Socket[bytes]") -> None:
        for _ in range(_SLICE):
            if dealer is not self._dealer:
                return
            try:
                answer = parse_replayed(dealer.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            except RemoteProtocolError as error:
                self._malformed(error)
                continue
            if answer.seq is None:
                self._end_replay()
                self._replay(self.feed.on_replay_end(self._generation))
                return
            self._restart_timer()
            self.feed.on_replayed(self._generation, answer.seq, answer.payload)
        self._loop.call_soon(self._take_replayed, dealer)
