"""All engines, by role: connections and health here, what they have to do in the core's book."""

import asyncio
import logging
from collections.abc import Iterable

from router.breaker import Breaker, BreakerConfig
from router.core.cluster_book import ClusterBook
from router.core.view import ClusterView, Role
from router.http.upstream import UpstreamPool
from router.instance import Instance
from router.instance_spec import Health, InstanceSpec, parse_instance_url

logger = logging.getLogger(__name__)


class Cluster:
    """Changed only on the event loop's thread."""

    def __init__(
        self,
        book: ClusterBook,
        *,
        breaker: BreakerConfig,
        upstream_idle_timeout_s: float,
        connect_timeout_s: float,
    ) -> None:
        self.book = book
        self._breaker = breaker
        self._upstream_idle_timeout_s = upstream_idle_timeout_s
        self._connect_timeout_s = connect_timeout_s
        self.instances: dict[str, Instance] = {}
        self._leaving: list[Instance] = []
        self._store_nodes: dict[str, str] = {}
        self._by_role: dict[Role, list[Instance]] = {role: [] for role in Role}

    @property
    def separates_prefill(self) -> bool:
        """Prefill and decode run on different instances."""
        return bool(self._by_role[Role.DECODE])

    def num_ranks(self, base_url: str = "") -> int:
        """Data parallel ranks that are instances of their own: of that engine, "" for the most any has. 1
        where ranks are not steered. Not from the configuration: discovered engines have their own number."""
        specs = [one.spec for one in self.instances.values() if base_url in ("", one.spec.base_url)]
        return max((spec.dp_rank + 1 for spec in specs if spec.dp_rank is not None), default=1)

    def configure(self, breaker: BreakerConfig) -> None:
        """From now on; breakers begin anew when their settings have changed."""
        if breaker != self._breaker:
            self._breaker = breaker
            for instance in self.instances.values():
                instance.breaker = Breaker(breaker)

    def apply(self, specs: Iterable[InstanceSpec]) -> None:
        """Makes the cluster what discovery says. Instances that left finish what they have."""
        wanted = {spec.url: spec for spec in specs}
        for url, instance in list(self.instances.items()):
            if wanted.get(url) != instance.spec:
                logger.info("instance left", extra={"instance": url, "in_flight": instance.in_flight})
                instance.draining = True
                self._leaving.append(self.instances.pop(url))
                self.book.remove(url)
        for url, spec in wanted.items():
            if url not in self.instances:
                host, port = parse_instance_url(spec.base_url)
                pool = UpstreamPool(
                    host,
                    port,
                    idle_timeout_s=self._upstream_idle_timeout_s,
                    connect_timeout_s=self._connect_timeout_s,
                )
                self.instances[url] = Instance(spec, pool, self._breaker)
                self.book.add_instance(url, spec.role, store_node=self._store_node_of(spec, host))
                logger.info("instance joined", extra={"instance": url, "role": spec.role.value})
        for role in Role:
            self._by_role[role] = [i for i in self.instances.values() if i.role is role]

    def add_store_node(self, node_id: str, *names: str) -> int:
        """A store that publishes what it holds; `names`: its host and its address, "" for unknown. Engines
        that join later on that host, or name it as theirs, read it as their own memory. Returns its worker
        number in the index."""
        for name in filter(None, names):
            self._store_nodes[name] = node_id
        return self.book.add_store_node(node_id)

    def _store_node_of(self, spec: InstanceSpec, host: str) -> str:
        return self._store_nodes.get(spec.store) or self._store_nodes.get(host, "")

    def view(self, now: float) -> ClusterView:
        for instance in self.instances.values():
            is_available = instance.is_available(now)
            if is_available is not instance.is_offered:
                instance.is_offered = is_available
                self.book.set_available(instance.url, is_available)
        return self.book.view(now)

    def is_ready(self) -> bool:
        """At least one instance that can answer clients has been seen healthy. A missing prefill instance
        does not count: its work is then done by the decode instances."""
        answering = self._by_role[Role.DECODE] or self._by_role[Role.MIXED]
        return any(i.health is Health.UP and not i.draining for i in answering)

    def sweep(self, now: float) -> None:
        for instance in self.instances.values():
            instance.pool.close_stale(now)
        for instance in list(self._leaving):
            instance.pool.close_stale(now)
            if instance.in_flight == 0 and instance.pool.num_open == 0:
                self._leaving.remove(instance)

    async def close(self) -> None:
        everything = [*self.instances.values(), *self._leaving]
        await asyncio.gather(*(instance.pool.close() for instance in everything))
