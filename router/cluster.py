"""All engines, by role, and the immutable view of them that decisions are made from."""

import asyncio
import logging
from collections.abc import Iterable

from router.breaker import BreakerConfig
from router.core.view import ClusterView, InstanceState, Role
from router.http.upstream import UpstreamPool
from router.instance import Health, Instance, InstanceSpec, parse_instance_url

logger = logging.getLogger(__name__)


class Cluster:
    """Changed only on the event loop's thread."""

    def __init__(
        self, *, breaker: BreakerConfig, upstream_idle_timeout_s: float, connect_timeout_s: float
    ) -> None:
        self._breaker = breaker
        self._upstream_idle_timeout_s = upstream_idle_timeout_s
        self._connect_timeout_s = connect_timeout_s
        self.instances: dict[str, Instance] = {}
        self._leaving: list[Instance] = []
        self._by_role: dict[Role, list[Instance]] = {role: [] for role in Role}

    @property
    def separates_prefill(self) -> bool:
        """Prefill and decode run on different instances."""
        return bool(self._by_role[Role.DECODE])

    def apply(self, specs: Iterable[InstanceSpec]) -> None:
        """Makes the cluster what discovery says. Instances that left finish what they have."""
        wanted = {spec.url: spec for spec in specs}
        for url, instance in list(self.instances.items()):
            if url not in wanted or wanted[url].role is not instance.role:
                logger.info("instance left", extra={"instance": url, "in_flight": instance.in_flight})
                instance.draining = True
                self._leaving.append(self.instances.pop(url))
        for url, spec in wanted.items():
            if url not in self.instances:
                host, port = parse_instance_url(url)
                pool = UpstreamPool(
                    host,
                    port,
                    idle_timeout_s=self._upstream_idle_timeout_s,
                    connect_timeout_s=self._connect_timeout_s,
                )
                self.instances[url] = Instance(spec, pool, self._breaker)
                logger.info("instance joined", extra={"instance": url, "role": spec.role.value})
        for role in Role:
            self._by_role[role] = [i for i in self.instances.values() if i.role is role]

    def view(self, now: float) -> ClusterView:
        return ClusterView(
            mixed=self._available(Role.MIXED, now),
            prefill=self._available(Role.PREFILL, now),
            decode=self._available(Role.DECODE, now),
        )

    def _available(self, role: Role, now: float) -> tuple[InstanceState, ...]:
        members = self._by_role[role]
        return tuple([i.state() for i in members if i.is_available(now)]) if members else ()

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
