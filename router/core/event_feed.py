"""One publisher's KV events put in order: gaps are replayed, restarts noticed, then the index is told.

Sequence numbers count batches from 0 per publisher (per DP rank). The shell owns the sockets: it hands in
what arrives and carries out the `ReplayFrom` it gets back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import msgspec

from kvcore.errors import RemoteProtocolError
from kvcore.wire.events import AllBlocksCleared, Event, decode_batch

# What comes live while a replay is under way.
MAX_HELD_BATCHES = 20_000
MAX_HELD_BYTES = 64 << 20


class ReplayFrom(msgspec.Struct, frozen=True, gc=False):
    """Effect: ask the publisher for its batches from `first_seq` on.

    Hand each to `on_replayed`, then call `on_replay_end`, or `on_replay_failed` when there is no replay
    endpoint or no answer; always with this `generation`, so that late answers can be told apart.
    """

    first_seq: int
    generation: int


class FeedStats(msgspec.Struct):
    batches: int = 0
    bad_batches: int = 0
    skipped_events: int = 0
    gaps: int = 0
    restarts: int = 0
    losses: int = 0  # times something could not be replayed, so that everything was forgotten
    foreign_events: int = 0  # of other models' blocks in a store that is shared with them


class EventSink(Protocol):
    """What a feed tells: a prefix index."""

    def apply(self, worker: int, events: Sequence[Event]) -> None: ...

    def clear_worker(self, worker: int) -> None: ...


class EventFeed:
    """`namespaces`: what events must be of, where they say what they are of; empty: of any."""

    def __init__(
        self,
        index: EventSink,
        worker: int,
        max_held_batches: int = MAX_HELD_BATCHES,
        namespaces: frozenset[str] = frozenset(),
        max_held_bytes: int = MAX_HELD_BYTES,
    ) -> None:
        self.stats = FeedStats()
        self._namespaces = namespaces
        self._index = index
        self._worker = worker
        self._max_held_batches = max_held_batches
        self._max_held_bytes = max_held_bytes
        self._generation = 0
        self._last_seq = -1  # applied
        self._newest_seq = -1  # seen live
        self._replaying = False
        self._replay_helped = False
        self._held: deque[tuple[int, bytes]] = deque()
        self._held_bytes = 0

    @property
    def is_current(self) -> bool:
        """Nothing is known to be missing."""
        return not self._replaying

    def connected(self) -> ReplayFrom:
        """A new connection: ask for the history at once, an idle engine would not publish for long."""
        return self._replay()

    def reset(self) -> None:
        """The connection was lost or the engine was seen down: what it held is not known any more.

        Needed because a restarted engine may have counted past our last number before we hear it again.
        """
        self._index.clear_worker(self._worker)
        self._generation += 1
        self._last_seq = self._newest_seq = -1
        self._replaying = False
        self._held.clear()
        self._held_bytes = 0

    def on_published(self, seq: int, payload: bytes) -> ReplayFrom | None:
        """A live batch. Live numbers only go back when the publisher has started anew."""
        effect = None
        if seq <= self._newest_seq:
            self.stats.restarts += 1
            self.reset()
        if not self._replaying and seq > self._last_seq + 1:
            self.stats.gaps += 1
            effect = self._replay()
        self._newest_seq = seq
        if not self._replaying:
            self._apply(seq, payload)
            return None
        self._held.append((seq, payload))
        self._held_bytes += len(payload)
        if len(self._held) > self._max_held_batches or self._held_bytes > self._max_held_bytes:
            self.on_replay_failed(self._generation)
            return None
        return effect

    def on_replayed(self, generation: int, seq: int, payload: bytes) -> None:
        """One batch of a replay, in order. Those applied already are recognised."""
        if generation != self._generation or seq <= self._last_seq:
            return
        if seq > self._last_seq + 1:
            self._forget()
        self._apply(seq, payload)

    def on_replay_end(self, generation: int) -> ReplayFrom | None:
        """Takes up the live batches that waited; another replay when there is still a gap among them."""
        if generation != self._generation:
            return None
        return self._take_up_held(give_up=not self._replay_helped)

    def on_replay_failed(self, generation: int) -> None:
        """The gap stays: the worker's blocks are forgotten and what comes after the gap is taken up."""
        if generation == self._generation:
            self._take_up_held(give_up=True)

    def _replay(self) -> ReplayFrom:
        self._replaying = True
        self._replay_helped = False
        self._generation += 1
        return ReplayFrom(self._last_seq + 1, self._generation)

    def _take_up_held(self, give_up: bool) -> ReplayFrom | None:
        while self._held:
            seq, payload = self._held[0]
            if seq > self._last_seq + 1:
                if not give_up:
                    return self._replay()
                self._forget()
            if seq > self._last_seq:
                self._apply(seq, payload)
            self._held.popleft()
            self._held_bytes -= len(payload)
        self._replaying = False
        self._generation += 1
        return None

    def _forget(self) -> None:
        self.stats.losses += 1
        self._index.clear_worker(self._worker)

    def _apply(self, seq: int, payload: bytes) -> None:
        self._last_seq = seq
        self._replay_helped = True
        self.stats.batches += 1
        try:
            batch = decode_batch(payload)
        except RemoteProtocolError:
            # What it said is lost for good: a replay would bring the same bytes.
            self.stats.bad_batches += 1
            return
        self.stats.skipped_events += batch.num_skipped
        events = batch.events
        if self._namespaces:
            events = [event for event in events if self._is_ours(event)]
            self.stats.foreign_events += len(batch.events) - len(events)
        self._index.apply(self._worker, events)

    def _is_ours(self, event: Event) -> bool:
        if isinstance(event, AllBlocksCleared):
            return True
        return not event.namespace or event.namespace in self._namespaces
