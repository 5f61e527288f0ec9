"""The store's process: one loop, its listeners, its one timer, and eviction in the background."""

import asyncio
import contextlib
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvcore import metrics
from kvcore.clock import Clock, WallClock
from kvcore.errors import RequestRefused
from kvcore.file_limit import affordable_connections
from kvcore.transport.host import host_id
from kvcore.transport.verbs import Binding, RdmaUnavailable, load_binding
from kvcore.units import format_size
from kvcore.wire.messages import (
    ErrorCode,
    ErrorReply,
    Evict,
    EvictReply,
    EvictStrategy,
    Reply,
    ShmOffer,
    Tier,
)
from store_server.attach import AttachPoint
from store_server.checker import Checker
from store_server.cold_levels import ColdLevels
from store_server.config import StoreConfig
from store_server.connection import StoreConnection
from store_server.core.deadlines import NEVER
from store_server.core.objects import Session
from store_server.core.owners import OPERATOR
from store_server.core.placements import PlacementLog
from store_server.core.reads import Served
from store_server.core.store import Store
from store_server.drain import Drainer
from store_server.loop_errors import log_loop_error
from store_server.mapped_pool import open_pool
from store_server.payload import PayloadViews
from store_server.peer_copies import PeerCopier
from store_server.pool import check_available
from store_server.rdma import RdmaPoint
from store_server.replicas import ReplicaKeeper
from store_server.runtime_dir import RuntimeDir
from store_server.tenants import Tenants
from store_server.tls import server_context
from store_server.unix_socket import SocketFile, check_socket_path
from store_server.wakefulness import Wakefulness

if TYPE_CHECKING:
    from store_server.events import EventPublisher

logger = logging.getLogger(__name__)

_EVICTION_SLICE = 256  # objects; about a millisecond
_EVICTION_PAUSE_S = 0.1
_UPKEEP_INTERVAL_S = 1.0
_OWN_FILES = 64
_FILES_PER_CLIENT = 2  # its connection, and one more when it maps the pool


class StoreServer:
    """Made and used inside one running loop. ConfigError when the configuration or this machine forbid it."""

    store: Store

    def __init__(
        self,
        config: StoreConfig,
        clock: Clock | None = None,
        load_verbs: Callable[[], Binding] = load_binding,
    ) -> None:
        config.check()
        self.max_connections = affordable_connections(
            config.max_connections, files_per_client=_FILES_PER_CLIENT, own_files=_OWN_FILES
        )
        pool_path = config.dram_path()
        if pool_path is None and not config.huge_pages:
            # First of all: bookkeeping for a pool that nobody can have takes long as well.
            check_available(config.pool_size_bytes)
        self.config = config
        self.clock: Clock = clock or WallClock()
        self.server_id = secrets.token_hex(8)
        ssd, remote = config.ssd(), config.remote()
        placements = PlacementLog() if config.events.endpoint else None
        self.tenants = Tenants(config.tenants, config.token)
        quotas = self.tenants.quotas
        self._cold = (
            ColdLevels(ssd, remote, self._notify_cold, self._on_pushed_out, placements, quotas)
            if ssd is not None or remote is not None
            else None
        )
        self.store = Store(config.limits(), self._cold, placements, quotas)
        self.events: EventPublisher | None = None
        if placements is not None:
            # Not at the top: nobody else needs ZMQ.
            from store_server import events

            self.events = events.EventPublisher(config.events, placements, self._holdings)
        self.pool = open_pool(pool_path, self.store.space.capacity_bytes, huge_pages=config.huge_pages)
        self.views = PayloadViews(self.pool.view)
        self.num_requests: Counter[type] = Counter()
        """By the type of message."""
        self.stopping = asyncio.Event()
        """Set when the process is to end: by a signal, or by a drain that was asked for that."""
        self.drainer = Drainer(self.store, self.clock, self.stopping.set)
        self.replicas = ReplicaKeeper(self.store, self._cold, config.max_waiting_keys)
        self.copies = PeerCopier(config, self.store, self._cold, self.views, self.clock, self.settle)
        self.checker = Checker(self.store, self._cold, self.views)
        self.tcp_port = 0
        self.unix_path = Path()
        self._socket_file: SocketFile | None = None
        self._loop = asyncio.get_running_loop()
        self.wakefulness = Wakefulness(self._loop, config.spin_us / 1e6)
        self._connections: dict[int, StoreConnection] = {}
        self._nobody_connected = asyncio.Event()
        self._listeners: list[asyncio.Server] = []
        self._runtime_dir = RuntimeDir()
        self._attach: AttachPoint | None = None
        self._load_verbs = load_verbs
        self.rdma: RdmaPoint | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = NEVER
        self._is_evicting = False
        self._upkeep: asyncio.TimerHandle | None = None

    # ---- life ------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listens. OSError from binding, ConfigError from the SSD; the caller calls `stop` also then."""
        loop = self._loop
        if self._cold is not None:
            await self._cold.open(self.pool.view)
        loop.set_exception_handler(log_loop_error)
        if self.events is not None:
            self.events.start()
        config = self.config
        tls = server_context(config.tls_cert, config.tls_key, config.tls_client_ca)
        tcp = await loop.create_server(
            lambda: StoreConnection(self),
            config.host,
            config.port,
            backlog=1024,
            ssl=tls,
            ssl_handshake_timeout=config.hello_timeout_ms / 1e3 if tls else None,
        )
        self._listeners.append(tcp)
        self.tcp_port = tcp.sockets[0].getsockname()[1]
        self.unix_path = Path(config.unix_path or self._runtime_dir.path / "store.sock")
        check_socket_path(self.unix_path)
        unix = await loop.create_unix_server(lambda: StoreConnection(self), str(self.unix_path), backlog=1024)
        self._socket_file = SocketFile(self.unix_path)
        self._listeners.append(unix)
        if "shm" in config.planes:
            self._attach = AttachPoint(
                self._runtime_dir.path / "pool.sock", self.pool.fd, self.store.writes.access_ended, loop
            )
        if "rdma" in config.planes:
            self._register_pool()
        self._upkeep = loop.call_later(_UPKEEP_INTERVAL_S, self._keep_up)
        logger.info(
            "store is listening",
            extra={
                "host": config.host,
                "port": self.tcp_port,
                "unix_path": str(self.unix_path),
                "pool": format_size(self.pool.size_bytes),
                "slab": format_size(self.store.space.allocator.slab_bytes),
                "eviction": config.eviction_policy,
            },
        )

    async def stop(self, grace_s: float = 2.0) -> None:
        """Answers already under way still go out within `grace_s` seconds."""
        for listener in self._listeners:
            listener.close()
        for connection in list(self._connections.values()):
            connection.close()
        if self._connections:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._nobody_connected.wait(), grace_s)
        for connection in list(self._connections.values()):
            connection.abort()
        await asyncio.sleep(0)
        await self.copies.close()
        await self.checker.cancel()
        if self._cold is not None:
            give_up_at = self.clock.now() + self.config.save_timeout_ms / 1e3
            await self.drainer.save(self.config.save_timeout_ms / 1e3)
            cold, self._cold = self._cold, None
            await cold.close(max(give_up_at - self.clock.now(), 0))
        for timer in (self._timer, self._upkeep):
            if timer is not None:
                timer.cancel()
        if self.events is not None:
            await self.events.stop()
        if self._attach is not None:
            self._attach.close()
        if self.rdma is not None:
            self.rdma.close()
        if self._socket_file is not None:
            self._socket_file.remove()
        self._runtime_dir.close()
        self.pool.close()

    # ---- for connections -------------------------------------------------------------------------------

    def admit(self, connection: StoreConnection) -> bool:
        if len(self._connections) >= self.max_connections:
            return False
        self._connections[connection.session.number] = connection
        self._nobody_connected.clear()
        return True

    def forget(self, connection: StoreConnection) -> None:
        self._connections.pop(connection.session.number, None)
        if not self._connections:
            self._nobody_connected.set()
        if self._attach is not None:
            self._attach.withdraw(connection.session)
        if self.rdma is not None:
            self.rdma.withdraw(connection.session)

    def offer_shm(self, session: Session, client_host_id: str) -> ShmOffer | None:
        """None for a client of another host, or when hosts cannot be told apart."""
        if self._attach is None or not client_host_id or client_host_id != host_id():
            return None
        nonce = self._attach.offer(session)
        return ShmOffer(str(self._attach.path), nonce, self.pool.size_bytes, str(self.unix_path))

    def settle(self) -> None:
        """After whatever changed the store: answers who has waited for it, and sets the timer."""
        store = self.store
        if not store.space.is_making_room:
            store.retry_for_room()  # otherwise when something has been written
        while store.waiters.finished:
            finished, store.waiters.finished = store.waiters.finished, []
            now = self.clock.now()
            for ticket in finished:
                connection = self._connections[ticket.session.number]
                try:
                    reply = store.reads.finish(ticket, now)
                except RequestRefused as error:
                    connection.send(ErrorReply(ticket.request.id, error.code, str(error), error.retryable))
                    continue
                if isinstance(reply, Served):
                    connection.send_served(reply)
                else:
                    connection.send(reply)
        if store.agenda.earliest < self._timer_due:
            self._set_timer(store.agenda.earliest)
        if not self._is_evicting and store.space.is_above_high_watermark:
            self._is_evicting = True
            self._loop.call_soon(self._evict_to_low_watermark)
        if self.events is not None:
            self.events.schedule()

    def evict(self, request: Evict, owner: bytes, answer: Callable[[Reply], None]) -> None:
        """In slices, so that evicting a million objects stops nobody for long. Of a tenant only what is its
        own goes."""
        try:
            strategy = EvictStrategy(request.strategy)
        except ValueError:
            raise RequestRefused(
                ErrorCode.BAD_REQUEST, f"no such strategy of eviction: {request.strategy}"
            ) from None
        space = self.store.space
        free_bytes = request.size_bytes or space.capacity_bytes
        num_objects = size_bytes = 0

        def evict_slice() -> None:
            nonlocal num_objects, size_bytes
            if owner == OPERATOR:
                objects, freed_bytes, is_done = space.evict_some(_EVICTION_SLICE, free_bytes, strategy)
            else:
                objects, freed_bytes, is_done = space.evict_some_of(
                    owner, _EVICTION_SLICE, free_bytes, strategy
                )
            num_objects += objects
            size_bytes += freed_bytes
            if is_done:
                answer(EvictReply(request.id, num_objects, size_bytes))
                self.settle()
            else:
                self._loop.call_soon(evict_slice)

        evict_slice()

    def requests_by_type(self) -> dict[str, float]:
        return {kind.__name__: count for kind, count in self.num_requests.items()}

    def stats(self) -> dict[str, float]:
        return {
            **self.store.stats(),
            metrics.REQUESTS_TOTAL: self.num_requests.total(),
            metrics.CONNECTIONS: len(self._connections),
            metrics.LOAD: self.store.reads.load,
            **self.copies.stats(),
            metrics.QUEUE_PAIRS: self.rdma.num_pairs if self.rdma is not None else 0,
            **(self._cold.stats() if self._cold is not None else {}),
            **(self.events.stats() if self.events is not None else {}),
        }

    def tenant_stats(self, prefix: bytes) -> dict[str, float]:
        """What a tenant may know: its own share of the store."""
        owners = self.store.owners
        assert owners is not None
        return {
            metrics.POOL_SIZE_BYTES: owners.limit_bytes(prefix),
            metrics.POOL_USED_BYTES: owners.used_bytes(prefix),
            metrics.OBJECTS: owners.num_objects(prefix),
            **(self._cold.stats_of(prefix) if self._cold is not None else {}),
        }

    def stats_by_tenant(self) -> dict[str, dict[str, float]]:
        """By name, for the metrics."""
        return {name: self.tenant_stats(prefix) for prefix, name in self.tenants.names.items()}

    def _on_pushed_out(self, keys: Sequence[bytes]) -> None:
        self.store.space.no_longer_cold(keys)

    def _holdings(self) -> Iterable[tuple[Tier, list[bytes]]]:
        yield Tier.DRAM, [obj.key for obj in self.store.catalog.by_key.values() if obj.is_sealed]
        if self._cold is not None:
            yield from self._cold.holdings()

    # ---- SSD and remote --------------------------------------------------------------------------------

    def _notify_cold(self) -> None:
        """Also from disk threads."""
        with contextlib.suppress(RuntimeError):  # the loop has ended before the last outcome
            self._loop.call_soon_threadsafe(self._on_cold)

    def _on_cold(self) -> None:
        if self._cold is None:
            return
        self._cold.poll(self.store)
        self.replicas.proceed()
        self.drainer.progressed()
        self.store.retry_for_room()
        if self.store.space.is_above_high_watermark:
            self.store.space.evict_some(_EVICTION_SLICE)  # the disk has room in its queue again
        self.settle()

    # ---- inside ----------------------------------------------------------------------------------------

    def _register_pool(self) -> None:
        """A host without RDMA is no error: clients of it use the other planes."""
        access_ended = self.store.writes.access_ended
        try:
            self.rdma = RdmaPoint(
                self.pool.view, self.config.device_name, access_ended, self._load_verbs, self._loop
            )
        except RdmaUnavailable as error:
            level = logging.WARNING if self.config.device_name else logging.INFO
            logger.log(level, "the rdma plane is not offered: %s", error)
        else:
            logger.info(
                "the rdma plane is offered",
                extra={"devices": self.rdma.offer.devices, "binding": self.rdma.binding_name},
            )

    def _set_timer(self, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_due = due
        if due != NEVER:
            # Never early: loops round to milliseconds.
            delay_s = max(due - self.clock.now(), 0) + 0.001
            self._timer = self._loop.call_later(delay_s, self._expire)

    def _expire(self) -> None:
        self._timer_due = NEVER
        self.store.expire(self.clock.now())
        self.settle()

    def _evict_to_low_watermark(self) -> None:
        *_, is_done = self.store.space.evict_some(_EVICTION_SLICE)
        if not is_done:
            self._loop.call_soon(self._evict_to_low_watermark)
        else:
            # What is left may be leased; asking again at once would be a busy loop.
            self._loop.call_later(_EVICTION_PAUSE_S, self._end_eviction)

    def _end_eviction(self) -> None:
        self._is_evicting = False
        self.settle()

    def _keep_up(self) -> None:
        """Once a second: how busy this thread is, and who has stopped taking answers."""
        self.store.reads.load = self.wakefulness.load()
        now = self.clock.now()
        for connection in list(self._connections.values()):
            connection.abort_if_stuck(now)
        self._upkeep = self._loop.call_later(_UPKEEP_INTERVAL_S, self._keep_up)
