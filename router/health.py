"""Probes every engine in the background. What it finds changes `Instance.health`, nothing else."""

import asyncio
import logging

from router.cluster import Cluster
from router.config import HealthConfig
from router.http.fetch import Fetched, Probe, fetch
from router.instance import Instance
from router.instance_spec import Health
from router.instance_tasks import InstanceTasks

logger = logging.getLogger(__name__)


class HealthMonitor:
    def __init__(self, cluster: Cluster, config: HealthConfig) -> None:
        self._cluster = cluster
        self.config = config
        self._tasks = InstanceTasks(self._probe_forever)

    def watch(self) -> None:
        """To be called after each change of the cluster."""
        self._tasks.follow(self._cluster.instances.values())

    async def close(self) -> None:
        await self._tasks.close()

    async def _probe_forever(self, instance: Instance) -> None:
        probe = Probe(instance.pool)
        config = self.config
        streak = Streak(config)
        while True:
            if config is not self.config:
                config = self.config
                streak = Streak(config)
            fetched = await fetch(probe, config.path, timeout_s=config.timeout_ms / 1e3)
            apply_probe(instance, streak, fetched)
            starting = instance.health is not Health.UP
            await asyncio.sleep((config.startup_interval_ms if starting else config.interval_ms) / 1e3)


class Streak:
    """Counts probes of one kind in a row. The first good probe of a new instance is enough: an engine that is
    starting has not failed, it only has not begun."""

    def __init__(self, config: HealthConfig) -> None:
        self._config = config
        self._good = 0
        self._bad = 0

    def next_health(self, current: Health, *, good: bool) -> Health:
        self._good = self._good + 1 if good else 0
        self._bad = 0 if good else self._bad + 1
        if good and (current is Health.UNKNOWN or self._good >= self._config.success_threshold):
            return Health.UP
        if not good and self._bad >= self._config.failure_threshold:
            return Health.DOWN
        return current


def apply_probe(instance: Instance, streak: Streak, fetched: Fetched) -> None:
    """Changes the instance's health by one probe, and says so when it changed."""
    good = 200 <= fetched.status < 300
    detail = "" if good else fetched.failure or f"status {fetched.status}"
    health = streak.next_health(instance.health, good=good)
    instance.health_detail = detail
    if health is instance.health:
        return
    instance.health = health
    if health is Health.UP:
        instance.breaker.close()
    log = logger.info if health is Health.UP else logger.warning
    log("instance %s", health.value, extra={"instance": instance.url, "detail": detail})
