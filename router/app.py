"""The router as a whole: what it owns, how it starts, drains and stops."""

import asyncio
import logging
from collections.abc import Callable
from typing import cast

from kvcore.errors import ConfigError
from kvcore.file_limit import affordable_connections
from router.bootstrap import BootstrapDirectory
from router.cluster import Cluster
from router.conductor.service import Conductor
from router.config import RouterConfig
from router.core.cluster_book import ClusterBook
from router.core.policies import make_policy
from router.core.prefix_index import PrefixIndex
from router.core.record import Header
from router.core.recording import RecordingBook, RecordingIndex, RecordingScheduler, Write
from router.core.scheduler import Scheduler
from router.core.view import Role
from router.dashboard.watch import Watch
from router.decisions import DecisionLog
from router.discovery import Discovery, StaticDiscovery
from router.endpoints import key_is_known, refusal_by_head, route
from router.health import HealthMonitor
from router.http.request import Request
from router.http.response import Response
from router.http.server import ActiveRequest, ClientConnection
from router.ids import IdSource
from router.kv_events.reader import EventReader
from router.load import LoadMonitor
from router.metrics import RouterMetrics
from router.prefetch import Prefetcher
from router.prefix_copies import PrefixCopier
from router.prompts.reader import PromptReader
from router.protocols import pd_protocol
from router.reload import changes, check_change
from router.store_links import StoreLinks

logger = logging.getLogger(__name__)

_SWEEP_INTERVAL_S = 0.5
_DISCOVER_AGAIN_S = 1.0  # after an error nobody thought of
_OWN_FILES = 128  # probes, events, connections to stores
_FILES_PER_CLIENT = 3  # its connection, and a prefill and a decode leg
_NOT_FOLLOWED = "an engine that joined cannot be followed: %s"


class Router:
    """`start`, then serve until `stop`. One event loop, one thread; more processes may share a port's work
    behind any TCP balancer, each with its own view."""

    def __init__(
        self,
        config: RouterConfig,
        discovery: Discovery,
        record: Write | None = None,
        reread: Callable[[], RouterConfig] | None = None,
    ) -> None:
        """`record` gets a line for everything the core is told and decides. `reread` gives the configuration
        as it is written now, for `reload`."""
        self.config = config
        self._records = record is not None
        self._reread = reread
        self.limits = config.http
        self._max_connections = _affordable(config)
        self.draining = False
        self._connections: set[ClientConnection] = set()
        self._no_connections = asyncio.Event()
        self.ids = IdSource()
        self.metrics = RouterMetrics()
        self.decisions = DecisionLog()
        self.index: PrefixIndex | None = None
        stores, namespaces = config.store_sources(), frozenset(config.store_namespaces)
        has_events = bool(config.kv_events or stores)
        if has_events or config.reads_prompts:
            limits = config.index
            sizes = limits.block_size_tokens, limits.max_size_bytes, limits.predicted_ttl_ms / 1e3
            self.index = PrefixIndex(*sizes) if record is None else RecordingIndex(*sizes, write=record)
        if record is None:
            book: ClusterBook = ClusterBook(config.scheduling, self.index)
            self.scheduler: Scheduler = _scheduler(config)
        else:
            block_size = config.index.block_size_tokens if self.index is not None else 0
            prefill, decode = config.policies
            record(Header(config.scheduling, prefill, decode, block_size))
            book = RecordingBook(config.scheduling, self.index, record)
            self.scheduler = RecordingScheduler(
                make_policy(prefill, config.scheduling),
                make_policy(decode, config.scheduling),
                config.scheduling,
                record,
            )
        self.cluster = Cluster(
            book,
            breaker=config.breaker,
            upstream_idle_timeout_s=config.upstream_idle_timeout_ms / 1e3,
            connect_timeout_s=config.connect_timeout_ms / 1e3,
        )
        self.watch = Watch(self.cluster, self.metrics, self.index)
        self.generation = pd_protocol(config.pd_protocol)
        self._keys = _keys(config)
        self._discovery = discovery
        self.events: EventReader | None = None
        self.prompts: PromptReader | None = None
        if self.index is not None:
            self.events = EventReader(self.cluster, self.index, stores, namespaces)
        if self.index is not None and config.reads_prompts:
            self.prompts = PromptReader(config.prompts, config.index.block_size_tokens, self.index.lora_names)
            if has_events and not config.prompts.tokenizer:
                logger.warning("no tokenizer: only prompts sent as token ids can be matched with KV events")
        self.bootstrap = BootstrapDirectory(config)
        addresses = {f"store {one.endpoint}": one.store_address for one in stores if one.store_address}
        self._store_links = StoreLinks(addresses, config.store_token, namespaces)
        self.prefetcher = Prefetcher(self.cluster.book, self.index, self._store_links)
        self.copier = PrefixCopier(self.cluster.book, self.index, self._store_links)
        self.conductor = Conductor(config.index.max_size_bytes)
        self._loads = LoadMonitor(self.cluster, config.load)
        self._health = HealthMonitor(self.cluster, config.health)
        self._server: asyncio.Server | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> tuple[str, int]:
        """Listens; returns the address. Raises OSError when it cannot, ConfigError when another address of
        its configuration cannot be used."""
        loop = asyncio.get_running_loop()
        if self.events is not None:
            self.events.start()
        self._server = await loop.create_server(
            lambda: cast(asyncio.Protocol, ClientConnection(self)),
            self.config.host,
            self.config.port,
            backlog=2048,
        )
        discovered = asyncio.Event()
        self._tasks = [loop.create_task(self._discover(discovered)), loop.create_task(self._sweep_forever())]
        discovering, waiting = self._tasks[0], loop.create_task(discovered.wait())
        await asyncio.wait((discovering, waiting), return_when=asyncio.FIRST_COMPLETED)
        if discovering.done():
            waiting.cancel()
            discovering.result()
        host, port = self._server.sockets[0].getsockname()[:2]
        return host, port

    async def drain(self) -> None:
        """Takes no new connections, lets running requests end within the drain timeout."""
        self.draining = True
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.close_if_idle()
        try:
            await asyncio.wait_for(self._all_closed(), self.config.drain_timeout_ms / 1e3)
        except asyncio.TimeoutError:
            logger.warning("drain timeout: requests are cut", extra={"connections": len(self._connections)})

    async def stop(self) -> None:
        """Cuts what is left. Idempotent; `drain` first to be polite."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.transport.abort()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._health.close()
        await self._loads.close()
        await self.bootstrap.close()
        await self.conductor.close()
        await self.prefetcher.close()
        await self.copier.close()
        await self._store_links.close()
        if self.events is not None:
            await self.events.close()
        if self.prompts is not None:
            self.prompts.close()
        await self.cluster.close()
        await self._all_closed()

    async def _all_closed(self) -> None:
        self._no_connections.clear()
        if self._connections:
            await self._no_connections.wait()

    async def _discover(self, discovered: asyncio.Event) -> None:
        while True:
            try:
                await self._follow_discovery(discovered)
            except Exception:
                if not discovered.is_set():
                    raise
                logger.exception("internal error: engines are looked for again")
            await asyncio.sleep(_DISCOVER_AGAIN_S)

    async def _follow_discovery(self, discovered: asyncio.Event) -> None:
        async for specs in self._discovery.changes():
            self.cluster.apply(specs)
            try:
                self._follow_cluster()
            except ConfigError as error:
                if not discovered.is_set():
                    raise
                logger.error(_NOT_FOLLOWED, error)
            discovered.set()

    def _follow_cluster(self) -> None:
        """After each change of the cluster or the configuration. ConfigError for an address of KV events."""
        self._health.watch()
        self._loads.watch(wanted=self.config.asks_loads)
        # Only this protocol has servers that can be asked.
        asked = self.config.pd_protocol == "mooncake"
        instances = self.cluster.instances.values() if asked else ()
        self.bootstrap.watch(i for i in instances if i.role is Role.PREFILL)
        if self.events is not None:
            self.events.watch()

    async def _sweep_forever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_SWEEP_INTERVAL_S)
            try:
                self._sweep(loop.time())
            except Exception:
                logger.exception("internal error")  # without sweeps no request would have a deadline

    def _sweep(self, now: float) -> None:
        for connection in list(self._connections):
            connection.sweep(now)
        self.cluster.sweep(now)
        self.watch.tick(now)
        self.conductor.index.sweep()
        if self.events is not None:
            self.events.sweep()

    def reload(self) -> list[str]:
        """Takes on the configuration as it is written now; requests under way end as they began. Returns
        what changed, by dotted names. ConfigError, with nothing changed, when it cannot be taken on."""
        if self._reread is None:
            raise ConfigError("this router was not started from a configuration that could be read again")
        old, new = self.config, self._reread()
        specs, generation = new.instance_specs(), pd_protocol(new.pd_protocol)
        check_change(
            old,
            new,
            reads_prompts=self.prompts is not None,
            has_index=self.index is not None,
            records=self._records,
        )
        changed = changes(old, new)
        if (old.scheduling, old.policies) != (new.scheduling, new.policies):
            self.scheduler = _scheduler(new)
            self.cluster.book.configure(new.scheduling)
        self.config, self.limits, self.generation = new, new.http, generation
        self._max_connections = _affordable(new)
        self._keys = _keys(new)
        self.cluster.configure(new.breaker)
        self._health.config, self._loads.config, self.bootstrap.config = new.health, new.load, new
        if old.bootstrap_port != new.bootstrap_port:
            self.bootstrap.watch(())
        if old.log_level != new.log_level:
            logging.getLogger().setLevel(new.log_level.upper())
        if isinstance(self._discovery, StaticDiscovery):
            self._discovery.replace(specs)
        else:
            # The engines stay; what is asked of them may have changed.
            try:
                self._follow_cluster()
            except ConfigError as error:
                logger.error(_NOT_FOLLOWED, error)
        logger.info("the configuration was read again; changed: %s", ", ".join(changed) or "nothing")
        return changed

    # What connections need of us (router.http.server.Application)

    def opened(self, client: ClientConnection) -> bool:
        self._connections.add(client)
        self.metrics.client_connections = len(self._connections)
        return len(self._connections) <= self._max_connections

    def closed(self, client: ClientConnection) -> None:
        self._connections.discard(client)
        self.metrics.client_connections = len(self._connections)
        if not self._connections:
            self._no_connections.set()

    def handle(self, client: ClientConnection, request: Request) -> ActiveRequest | None:
        return route(self, client, request)

    def refusal(self, client: ClientConnection, head: Request) -> Response | None:
        return refusal_by_head(self, client, head)

    def refused(self, status: int) -> None:
        self.metrics.refusals[status] += 1

    def authorized(self, request: Request) -> bool:
        return not self._keys or key_is_known(request.headers.get(b"authorization", b""), self._keys)


def _scheduler(config: RouterConfig) -> Scheduler:
    """ConfigError when there is no such policy or admission."""
    prefill, decode = (make_policy(name, config.scheduling) for name in config.policies)
    return Scheduler(prefill, decode, config.scheduling)


def _affordable(config: RouterConfig) -> int:
    """Clients at once. Those there are no files for would be cut without a word, and engines seem dead."""
    return affordable_connections(
        config.http.max_connections, files_per_client=_FILES_PER_CLIENT, own_files=_OWN_FILES
    )


def _keys(config: RouterConfig) -> tuple[bytes, ...]:
    return tuple(key.encode() for key in config.api_keys)
