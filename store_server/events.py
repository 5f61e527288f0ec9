"""Publishes what comes to the store and leaves it as KV events, in the format and with the replay of engines:
any KV-aware router can index the store like one more worker.

A block has the name the engine gave it; events hold no tokens, which the store does not know. A
subscriber that comes late, or has missed more than the replay buffer holds, is told everything the store
holds now, as if that were the end of its history.
"""

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import zmq

from kvcore import metrics
from kvcore.errors import ConfigError, RemoteProtocolError
from kvcore.keys import BLOCK_KEY_BYTES, namespace_of
from kvcore.wire.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    Medium,
    block_hash_of_key,
    encode_batch,
    parse_replay_request,
    published_frames,
    replay_end_frames,
    replayed_frames,
)
from kvcore.wire.messages import Tier
from store_server.core.block_names import BlockNames
from store_server.core.placements import Placed, PlacementLog
from store_server.events_config import EventsConfig

logger = logging.getLogger(__name__)

MEDIA = {Tier.DRAM: Medium.CPU, Tier.SSD: Medium.DISK, Tier.REMOTE: Medium.EXTERNAL}

_FLUSH_DELAY_S = 0.01
_KEYS_PER_EVENT = 4096
_EVENTS_PER_BATCH = 16  # of those that tell what a restarted store still holds
_SLOW_PEER_PAUSE_S = 0.01
_SLOW_PEER_LIMIT_S = 30.0
_SEND_QUEUE_BATCHES = 100_000


class EventPublisher:
    """Used in one loop. `holdings` gives what the store holds now, tier by tier."""

    def __init__(
        self,
        config: EventsConfig,
        log: PlacementLog,
        holdings: Callable[[], Iterable[tuple[Tier, list[bytes]]]],
    ) -> None:
        self._config = config
        self._log = log
        self._holdings = holdings
        self._context = zmq.Context(io_threads=1)
        self._publisher: zmq.Socket[bytes] | None = None
        self._router: zmq.Socket[bytes] | None = None
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._next_seq = 0
        self.names = BlockNames()
        self._flush_timer: asyncio.TimerHandle | None = None
        self._replays: dict[bytes, asyncio.Task[None]] = {}
        self._num_events = 0
        self._num_replays = 0
        self._num_snapshots = 0

    def start(self) -> None:
        """Binds both sockets. ConfigError when an endpoint cannot be had."""
        config = self._config
        self._publisher = self._bind(zmq.PUB, config.endpoint)
        if config.replay_endpoint:
            self._router = self._bind(zmq.ROUTER, config.replay_endpoint)
            # A peer that is gone or slow is an error to us: without it ZMQ drops its batches in silence.
            self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            asyncio.get_running_loop().add_reader(self._router.fileno(), self._on_router)
        # What lies on SSD from before comes first in the history.
        for tier, keys in self._holdings():
            for begin in range(0, len(keys), _EVENTS_PER_BATCH * _KEYS_PER_EVENT):
                self._log.stored(keys[begin : begin + _EVENTS_PER_BATCH * _KEYS_PER_EVENT], tier)
                self.flush()

    @property
    def endpoints(self) -> tuple[str, str]:
        """Where it really listens; "" for what is off."""
        return _endpoint(self._publisher), _endpoint(self._router)

    def schedule(self) -> None:
        """Something may have changed. Changes of some milliseconds become one batch."""
        if self._flush_timer is None and len(self._log):
            self._flush_timer = asyncio.get_running_loop().call_later(_FLUSH_DELAY_S, self.flush)

    def flush(self) -> None:
        """Publishes what has changed since the last time."""
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None
        runs = self._log.take()
        for run in runs:
            self._remember(run)
        events = list(self._events(runs))
        if events:
            self._publish(encode_batch(time.time(), events))
            self._num_events += len(events)

    def stats(self) -> dict[str, float]:
        return {
            metrics.EVENTS_TOTAL: self._num_events,
            metrics.EVENT_REPLAYS_TOTAL: self._num_replays,
            metrics.EVENT_SNAPSHOTS_TOTAL: self._num_snapshots,
        }

    async def stop(self) -> None:
        self.flush()
        for task in list(self._replays.values()):
            task.cancel()
        await asyncio.gather(*self._replays.values(), return_exceptions=True)
        if self._router is not None:
            asyncio.get_running_loop().remove_reader(self._router.fileno())
            self._router.close(linger=0)
        if self._publisher is not None:
            self._publisher.close(linger=100)
        await asyncio.to_thread(self._context.term)

    # ---- publishing ------------------------------------------------------------------------------------

    def _publish(self, payload: bytes) -> None:
        seq, self._next_seq = self._next_seq, self._next_seq + 1
        self._buffer.append((seq, payload))
        assert self._publisher is not None
        # A PUB socket never blocks: what a subscriber is too slow for is dropped, and it asks for a replay.
        self._publisher.send_multipart(published_frames(self._config.topic, seq, payload), zmq.NOBLOCK)

    def _events(self, runs: Iterable[Placed]) -> Iterator[Event]:
        for run in runs:
            medium = MEDIA[run.tier]
            for namespace, of_namespace in itertools.groupby(run.keys, namespace_of):
                for keys in _pieces(list(of_namespace)):
                    names = self._names(keys)
                    if not names:
                        continue
                    if run.is_stored:
                        yield BlockStored(names, None, [], 0, medium, namespace=namespace.hex())
                    else:
                        yield BlockRemoved(names, medium, namespace=namespace.hex())

    def _remember(self, run: Placed) -> None:
        keys = [key for key in run.keys if len(key) >= BLOCK_KEY_BYTES]
        named_keys = keys * len(self._config.hash_forms)
        if run.is_stored:
            self.names.stored(self._names(keys), named_keys, run.tier)
        else:
            self.names.removed(self._names(keys), named_keys, run.tier)

    def _names(self, keys: Sequence[bytes]) -> list[int]:
        return [
            block_hash_of_key(key, form)
            for form in self._config.hash_forms
            for key in keys
            if len(key) >= BLOCK_KEY_BYTES
        ]

    # ---- replaying -------------------------------------------------------------------------------------

    def _on_router(self) -> None:
        """The descriptor tells of news once, so everything there is has to be taken."""
        router = self._router
        while router is not None and router.poll(0):
            frames = router.recv_multipart(zmq.NOBLOCK)
            try:
                peer, first_seq = parse_replay_request(frames)
            except RemoteProtocolError as error:
                logger.warning("replay request ignored", extra={"reason": str(error)})
                continue
            if peer not in self._replays:
                task = asyncio.get_running_loop().create_task(self._replay(peer, first_seq))
                self._replays[peer] = task
                task.add_done_callback(partial(self._replayed, peer))

    def _replayed(self, peer: bytes, task: "asyncio.Task[None]") -> None:
        del self._replays[peer]

    async def _replay(self, peer: bytes, first_seq: int) -> None:
        self.flush()
        self._num_replays += 1
        topic = self._config.topic
        for seq, payload in self._history(first_seq):
            if not await self._send(replayed_frames(peer, topic, seq, payload)):
                return
            await asyncio.sleep(0)  # a batch may be large, and clients come first
        await self._send(replay_end_frames(peer))

    def _history(self, first_seq: int) -> Iterable[tuple[int, bytes]]:
        """The batches from `first_seq` on, or, if they are no longer known, what they came to."""
        oldest = self._buffer[0][0] if self._buffer else self._next_seq
        if first_seq >= oldest:
            return [entry for entry in self._buffer if entry[0] >= first_seq]
        self._num_snapshots += 1
        holdings = [(tier, piece) for tier, keys in self._holdings() for piece in _pieces(keys)]
        # Batches with the numbers before the next live one, as many as the subscriber does not know yet.
        size = max(1, -(-len(holdings) // (self._next_seq - first_seq)))
        groups = [holdings[begin : begin + size] for begin in range(0, len(holdings), size)] or [[]]
        return self._snapshot(groups, self._next_seq - len(groups))

    def _snapshot(
        self, groups: list[list[tuple[Tier, Sequence[bytes]]]], first_seq: int
    ) -> Iterator[tuple[int, bytes]]:
        for number, group in enumerate(groups):
            events: list[Event] = [] if number else [AllBlocksCleared()]
            events += self._events(Placed(True, tier, list(keys)) for tier, keys in group)
            yield first_seq + number, encode_batch(time.time(), events)

    async def _send(self, frames: list[bytes]) -> bool:
        """False when the peer is gone or takes nothing."""
        give_up_at = time.monotonic() + _SLOW_PEER_LIMIT_S
        while self._router is not None and time.monotonic() < give_up_at:
            try:
                self._router.send_multipart(frames, zmq.NOBLOCK)
            except zmq.Again:
                await asyncio.sleep(_SLOW_PEER_PAUSE_S)
            except zmq.ZMQError as error:
                logger.info("a subscriber left during its replay", extra={"reason": str(error)})
                return False
            else:
                return True
            finally:
                # Sending, also in vain, may take up what has arrived; the descriptor would not tell again.
                asyncio.get_running_loop().call_soon(self._on_router)
        return False

    # ---- inside ----------------------------------------------------------------------------------------

    def _bind(self, kind: int, endpoint: str) -> "zmq.Socket[bytes]":
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, _SEND_QUEUE_BATCHES if kind == zmq.PUB else 1000)
        if "[" in endpoint:
            socket.setsockopt(zmq.IPV6, 1)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise ConfigError(f"events: cannot listen on {endpoint}: {error.strerror}") from error
        return socket


def _endpoint(socket: "zmq.Socket[bytes] | None") -> str:
    if socket is None:
        return ""
    name = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(name, bytes)
    return name.rstrip(b"\0").decode()


def _pieces(keys: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    for begin in itertools.count(0, _KEYS_PER_EVENT):
        piece = keys[begin : begin + _KEYS_PER_EVENT]
        if not piece:
            return
        yield piece
