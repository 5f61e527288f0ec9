"""Publishers that were registered over HTTP, each followed over ZMQ into the index."""

import asyncio
from collections.abc import Sequence

import zmq

from kvcore.wire.events import Event
from router.core.conductor_index import ConductorIndex, Publisher
from router.core.event_feed import EventFeed
from router.kv_events.source import EventSource
from router.kv_events.subscriber import Subscriber

MAX_PUBLISHERS = 4096


class TooMany(Exception):
    """MAX_PUBLISHERS are registered."""


class _Sink:
    """One publisher's part of the index, as its feed sees it."""

    def __init__(self, index: ConductorIndex, publisher: Publisher) -> None:
        self._index = index
        self._publisher = publisher

    def apply(self, worker: int, events: Sequence[Event]) -> None:
        self._index.apply(self._publisher, events)

    def clear_worker(self, worker: int) -> None:
        self._index.clear(self._publisher)


class Conductor:
    """On the event loop's thread; sockets and threads of ZMQ exist from the first registration on."""

    def __init__(self, max_size_bytes: int) -> None:
        self.index = ConductorIndex(max_size_bytes)
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._registered: dict[str, tuple[Publisher, Subscriber]] = {}

    @property
    def num_publishers(self) -> int:
        return len(self._registered)

    def register(self, publisher: Publisher, source: EventSource) -> None:
        """Again under the same key takes the place of what was there, unless nothing differs. ConfigError
        for an endpoint that cannot be used; TooMany."""
        known = self._registered.get(publisher.key)
        if known is not None:
            if (known[0], known[1].source) == (publisher, source):
                return
            self.unregister(publisher.key)
        if len(self._registered) >= MAX_PUBLISHERS:
            raise TooMany
        if self._context is None:
            self._context = zmq.Context(io_threads=1)
        subscriber = Subscriber(self._context, source, EventFeed(_Sink(self.index, publisher), 0))
        subscriber.start()
        self._registered[publisher.key] = publisher, subscriber

    def unregister(self, key: str) -> bool:
        """False: there is no such publisher."""
        found = self._registered.pop(key, None)
        if found is None:
            return False
        found[1].close()
        self.index.remove(found[0])
        return True

    async def close(self) -> None:
        for key in list(self._registered):
            self.unregister(key)
        if self._context is not None:
            await asyncio.to_thread(self._context.term)
