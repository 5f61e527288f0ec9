"""All publishers of KV events: one subscriber for each engine that is there, and for each store."""

import asyncio
from collections.abc import Iterable, Sequence

import zmq

from router.cluster import Cluster
from router.core.event_feed import EventFeed
from router.core.prefix_index import PrefixIndex
from router.instance import Instance
from router.instance_spec import Health
from router.kv_events.source import EventSource
from router.kv_events.subscriber import Subscriber

# Between two slices of tidying after workers that left: a few percent of one core.
_TIDY_PAUSE_S = 0.01


class _Follower:
    def __init__(self, subscriber: Subscriber) -> None:
        self.subscriber = subscriber
        self.is_lost = False


class EventReader:
    """On the event loop's thread. `stores`: the sources of store nodes, of which blocks of `store_namespaces`
    count, or all when that is empty; engines come with their own."""

    def __init__(
        self,
        cluster: Cluster,
        index: PrefixIndex,
        stores: Sequence[EventSource],
        store_namespaces: frozenset[str],
    ) -> None:
        self._cluster = cluster
        self._index = index
        self._stores = stores
        self._store_namespaces = store_namespaces
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._followers: dict[Instance, _Follower] = {}
        self._store_followers: list[_Follower] = []
        self._tidying: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Before the first engine joins, for engines find the store node of their host then."""
        for source in self._stores:
            names = source.host, source.store_address
            worker = self._cluster.add_store_node(f"store {source.endpoint}", *names)
            self._store_followers.append(self._follow(source, worker, self._store_namespaces))

    def watch(self) -> None:
        """To be called after each change of the cluster."""
        # By instance, not by its URL: one that left and came back in between knows nothing of its blocks.
        present = {i: i.spec.events for i in self._cluster.instances.values() if i.spec.events is not None}
        for gone in self._followers.keys() - present.keys():
            self._followers.pop(gone).subscriber.close()
        for instance, source in present.items():
            worker = self._cluster.book.worker_of(instance.url)
            if instance not in self._followers and worker is not None:
                self._followers[instance] = self._follow(source, worker)

    def _follow(
        self, source: EventSource, worker: int, namespaces: frozenset[str] = frozenset()
    ) -> _Follower:
        feed = EventFeed(self._index, worker, namespaces=namespaces)
        follower = _Follower(Subscriber(self._context, source, feed))
        follower.subscriber.start()
        return follower

    def sweep(self) -> None:
        """Once in a while: engines that went down or came back, and what they left in the index."""
        for instance, follower in self._followers.items():
            is_down = instance.health is Health.DOWN
            if is_down and not follower.is_lost:
                follower.subscriber.lost()
            elif follower.is_lost and not is_down:
                follower.subscriber.found_again()
            follower.is_lost = is_down
        if self._tidying is None:
            self._tidy()

    def _tidy(self) -> None:
        self._tidying = None
        if self._index.sweep():
            self._tidying = asyncio.get_running_loop().call_later(_TIDY_PAUSE_S, self._tidy)

    def subscribers(self) -> Iterable[tuple[str, Subscriber]]:
        """(engine URL or endpoint of a store, subscriber)."""
        for instance, follower in self._followers.items():
            yield instance.url, follower.subscriber
        for follower in self._store_followers:
            yield follower.subscriber.source.endpoint, follower.subscriber

    async def close(self) -> None:
        if self._tidying is not None:
            self._tidying.cancel()
        for _, subscriber in list(self.subscribers()):
            subscriber.close()
        await asyncio.to_thread(self._context.term)
