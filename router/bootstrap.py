"""Engine ids of prefill engines by data parallel rank, from the bootstrap server of vLLM's MooncakeConnector.

vLLM 0.28 to 0.32 (mooncake_utils.py): GET /query answers {rank: {engine_id, worker_addr}}. Ids change when
the engine starts anew, so they are asked for again and again, and at once after a leg that failed.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping

import msgspec

from router.config import RouterConfig
from router.http.fetch import Probe, fetch
from router.http.upstream import UpstreamPool
from router.instance import Instance
from router.instance_tasks import InstanceTasks

logger = logging.getLogger(__name__)


class BootstrapServer(msgspec.Struct, frozen=True):
    """`address` as decode engines reach it; `engine_ids` by data parallel rank."""

    address: str
    engine_ids: Mapping[int, str]


class _Rank(msgspec.Struct, frozen=True):
    engine_id: str


_ANSWER = msgspec.json.Decoder(dict[int, _Rank])


class BootstrapDirectory:
    """On the event loop's thread."""

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        self._tasks = InstanceTasks(self._ask_forever)
        self._known: dict[Instance, BootstrapServer] = {}
        self._wanted: dict[Instance, asyncio.Event] = {}

    def watch(self, prefill: Iterable[Instance]) -> None:
        """Exactly these are asked from now on."""
        present = set(prefill)
        for gone in self._known.keys() - present:
            del self._known[gone]
        self._tasks.follow(present)

    def server_of(self, instance: Instance) -> BootstrapServer | None:
        """None while it has not answered: no decode engine could fetch from it."""
        return self._known.get(instance)

    def ask_again(self, instance: Instance) -> None:
        """A leg failed: it may have been started anew."""
        if instance in self._wanted:
            self._wanted[instance].set()

    async def close(self) -> None:
        await self._tasks.close()

    async def _ask_forever(self, instance: Instance) -> None:
        config, loop = self.config, asyncio.get_running_loop()
        port = instance.spec.bootstrap_port or config.bootstrap_port
        pool = UpstreamPool(
            instance.pool.host,
            port,
            idle_timeout_s=config.upstream_idle_timeout_ms / 1e3,
            connect_timeout_s=config.connect_timeout_ms / 1e3,
        )
        host = f"[{pool.host}]" if ":" in pool.host else pool.host
        wanted = self._wanted[instance] = asyncio.Event()
        try:
            while True:
                wanted.clear()
                fetched = await fetch(Probe(pool), "/query", timeout_s=self.config.health.timeout_ms / 1e3)
                self._learn(instance, f"http://{host}:{port}", fetched.status, fetched.body)
                health, known = self.config.health, instance in self._known
                pause_s = (health.interval_ms if known else health.startup_interval_ms) / 1e3
                # Not asyncio.wait_for: before Python 3.12 it loses a cancellation that comes together with
                # the event, and this would go on for ever.
                timer = loop.call_later(pause_s, wanted.set)
                try:
                    await wanted.wait()
                finally:
                    timer.cancel()
        finally:
            del self._wanted[instance]
            await pool.close()

    def _learn(self, instance: Instance, address: str, status: int, body: bytes) -> None:
        try:
            ranks = _ANSWER.decode(body) if status == 200 else {}
        except msgspec.DecodeError as error:
            logger.warning("not a bootstrap server of vLLM", extra={"address": address, "reason": str(error)})
            ranks = {}
        if not ranks:
            self._known.pop(instance, None)
            return
        server = BootstrapServer(address, {rank: found.engine_id for rank, found in sorted(ranks.items())})
        if self._known.get(instance) != server:
            logger.info("prefill engine %s transfers from %s", instance.url, address)
        self._known[instance] = server
