"""Copies of objects that another store holds, made in this one's DRAM as clients ask for them (CopyFrom).

This store is a client of the other for that: the bytes move on the best plane both have, straight into the
pool, and are held against their writer's checksums on every plane. Here they are reserved, committed layer by
layer and sealed like those of any writer, within the same quotas. So whoever reads them may follow the copy,
and a copy that breaks off leaves nothing half-written behind.
"""

import asyncio
import logging
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvcore import metrics
from kvcore.client.address import parse_address
from kvcore.client.sync_client import StoreClient
from kvcore.clock import Clock
from kvcore.errors import ConfigError, RequestRefused
from kvcore.transport.checksums import layer_checksums
from kvcore.wire.messages import (
    Abort,
    CopyFrom,
    ErrorCode,
    Reply,
    Reserve,
    ReserveReply,
    Status,
    StatusReply,
    Write,
)
from store_server.config import KNOWN_PLANES, StoreConfig
from store_server.core.copying import Copy, batches, layer_steps
from store_server.core.objects import Session
from store_server.core.spans import layer_spans
from store_server.core.store import Store
from store_server.core.tiering import ColdTier
from store_server.payload import PayloadViews
from store_server.peers import Peers
from store_server.pending_reply import PendingReply
from store_server.tenants import Client

logger = logging.getLogger(__name__)
_T = TypeVar("_T")

# Reserved and not yet sealed, for each request that is copied for; a small pool gives a sixteenth of itself.
_BATCH_BYTES = 32 << 20
_STEP_BYTES = 8 << 20

_HERE = {Status.EXISTS: Status.OK}
_SOURCE_TROUBLE = (Status.UNAVAILABLE, Status.TIMED_OUT)


class PeerCopier:
    """Used in the store's loop. Bytes come on the planes and devices that the store has for its clients;
    `settle` is called after each change."""

    def __init__(
        self,
        config: StoreConfig,
        store: Store,
        cold: ColdTier | None,
        views: PayloadViews,
        clock: Clock,
        settle: Callable[[], None],
    ) -> None:
        self._config = config.peers
        self._store = store
        self._cold = cold
        self._views = views
        self._clock = clock
        self._max_keys = config.max_waiting_keys  # under way
        self._settle = settle
        self._batch_bytes = min(_BATCH_BYTES, store.limits.pool_size_bytes // 16)
        # Who waits for each key that is under way; nobody, mostly.
        self._waiting: dict[bytes, list[tuple[PendingReply, int]]] = {}
        self._slots = asyncio.Semaphore(config.peers.max_copying)
        # One for each that is copied for, one to connect for the next.
        self._threads = ThreadPoolExecutor(config.peers.max_copying + 1, thread_name_prefix="mooncake-copy")
        planes = [name for name in KNOWN_PLANES if name in config.planes]  # best first
        self._peers = Peers(config.peers, self._threads, planes, config.device_name)
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closing = False
        self._outcomes: Counter[Status] = Counter()
        self._copied_bytes = 0

    def copy(self, request: CopyFrom, client: Client, answer: Callable[[Reply], None]) -> StatusReply | None:
        """`request` names keys as this store does. None when the answer comes later, by `answer`.
        RequestRefused for what cannot be done for this client, or not now."""
        self._check(request, client)
        reply = PendingReply(request.id, len(request.keys), answer)
        copies = []
        parents = request.parents or [b""] * len(request.keys)
        for index, (key, parent) in enumerate(zip(request.keys, parents, strict=True)):
            status = self._status_here(key)
            reply.statuses[index] = Status.PENDING if status is None else status
            if status is not None:
                continue
            if key not in self._waiting:
                self._waiting[key] = []
                copies.append(Copy(key, key[len(client.prefix) :], parent))
            if request.wait_ms > 0:
                self._waiting[key].append((reply, index))
                reply.num_open += 1
        if copies:
            task = asyncio.create_task(self._copy_all(request.source, client.token, copies))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if not reply.num_open:
            return reply.reply()
        loop = asyncio.get_running_loop()
        reply.timer = loop.call_later(request.wait_ms / 1e3, self._give_up, reply, request.keys)
        return None

    def stats(self) -> dict[str, float]:
        copied = self._outcomes[Status.OK]
        return {
            metrics.COPYING: len(self._waiting),
            metrics.COPIED_OBJECTS_TOTAL: copied,
            metrics.COPIED_BYTES_TOTAL: self._copied_bytes,
            metrics.COPY_MISSING_TOTAL: self._outcomes[Status.MISSING],
            metrics.COPY_FAILED_TOTAL: self._outcomes.total() - copied - self._outcomes[Status.MISSING],
        }

    async def close(self) -> None:
        """Ends what is under way; nothing touches the pool any more then."""
        self._is_closing = True
        await self._peers.close()
        await asyncio.gather(*self._tasks)
        self._threads.shutdown()

    # ---- requests --------------------------------------------------------------------------------------

    def _check(self, request: CopyFrom, client: Client) -> None:
        if len(request.parents) not in (0, len(request.keys)):
            raise RequestRefused(
                ErrorCode.BAD_REQUEST,
                f"{len(request.parents)} parents for {len(request.keys)} keys (give one a key, or none)",
            )
        try:
            parse_address(request.source)
        except ConfigError as error:
            raise RequestRefused(ErrorCode.BAD_REQUEST, str(error)) from error
        is_open = client.is_operator and not self._config.sources
        if not is_open and request.source not in self._config.sources:
            raise RequestRefused(
                ErrorCode.FORBIDDEN,
                f"{request.source} is none of this store's peers.sources, which clients may have copied from",
            )
        if len(self._waiting) + len(request.keys) > self._max_keys:
            raise RequestRefused(
                ErrorCode.OVER_LIMIT, f"{len(self._waiting)} objects are being copied already", True
            )

    def _status_here(self, key: bytes) -> Status | None:
        """None: it is being copied, or can be."""
        if key in self._waiting:
            return None
        obj = self._store.catalog.by_key.get(key)
        if obj is not None and obj.is_sealed:
            return Status.OK
        if self._cold is not None and self._cold.find(key) is not None:
            self._store.promotions.want(key)
            return Status.OK
        return None if obj is None else Status.PENDING

    def _give_up(self, reply: PendingReply, keys: Sequence[bytes]) -> None:
        """Waiting, not copying."""
        for index, key in enumerate(keys):
            waiting = self._waiting.get(key)
            if waiting is not None and (reply, index) in waiting:
                waiting.remove((reply, index))
        reply.timer = None
        reply.finish()

    # ---- copying ---------------------------------------------------------------------------------------

    async def _copy_all(self, source: str, token: str, copies: list[Copy]) -> None:
        deadline = self._clock.now() + self._config.timeout_ms / 1e3
        session = self._store.open_session(f"copies from {source}")
        outcome = Status.UNAVAILABLE
        try:
            async with self._slots:
                peer = None if self._is_closing else await self._peers.take(source, token)
                if peer is not None:
                    try:
                        outcome = await self._copy_from(peer.client, session, copies, deadline)
                    finally:
                        await self._in_thread(_let_go, peer.client)
                        self._peers.give_back(peer)
        except Exception:
            logger.exception("a copy failed", extra={"source": source})
        finally:
            self._store.close_session(session)
            for copy in copies:
                self._end(copy, outcome)
            self._settle()

    async def _copy_from(
        self, client: StoreClient, session: Session, copies: list[Copy], deadline: float
    ) -> Status:
        """What became of those that are still open then."""
        found = await self._in_thread(_describe, client, copies)
        if found is None:
            return Status.UNAVAILABLE
        wanted = {copy.key for copy in found}
        for copy in copies:
            if copy.key not in wanted:
                self._end(copy, Status.MISSING)
        for batch in batches(found, self._batch_bytes):
            if self._is_closing:
                return Status.UNAVAILABLE
            if self._clock.now() >= deadline:
                break
            reserved = await self._reserve(session, batch)
            for begin, end in layer_steps(batch, _STEP_BYTES):
                if reserved:
                    reserved, trouble = await self._move(client, session, reserved, begin, end, deadline)
                    if trouble is not None:
                        return trouble
        return Status.TIMED_OUT

    async def _reserve(self, session: Session, batch: list[Copy]) -> list[Copy]:
        """Those that this session may write now; waits for room as any writer does."""
        store = self._store
        keys, parents = [copy.key for copy in batch], [copy.parent for copy in batch]
        request = Reserve(0, keys, [batch[0].size_bytes], batch[0].num_layers, parents)
        granted: asyncio.Future[ReserveReply] = asyncio.get_running_loop().create_future()

        def attempt(is_last: bool) -> bool:
            reply = store.writes.reserve(session, request, self._clock.now(), may_wait=not is_last)
            if reply is not None:
                granted.set_result(reply)
            return reply is not None

        if len(store.room) or not attempt(False):
            store.room.park(session, attempt, self._clock.now())
        self._settle()
        reserved = []
        for copy, grant in zip(batch, (await granted).grants, strict=True):
            status = Status(grant.status)
            if status is Status.OK:
                reserved.append(copy)
            else:
                self._end(copy, _HERE.get(status, status))
        return reserved

    async def _move(
        self, client: StoreClient, session: Session, batch: list[Copy], begin: int, end: int, deadline: float
    ) -> tuple[list[Copy], Status | None]:
        """Those of which these layers are here now and others are to come; and why nothing more can be had
        from the source, if so."""
        store, num_layers = self._store, batch[0].num_layers
        share_bytes = batch[0].size_bytes // num_layers * (end - begin)
        incoming = store.writes.write_begin(
            session, Write(0, [copy.key for copy in batch], begin, end), share_bytes * len(batch)
        )
        places = [
            self._views.of(layer_spans(obj, begin, end)) if obj is not None else None
            for obj in incoming.objects
        ]
        timeout_ms = min(max(deadline - self._clock.now(), 0.0) * 1e3, self._config.answer_timeout_ms)
        try:
            statuses, incoming.checksums = await self._in_thread(
                _read, client, batch, begin, end, places, timeout_ms
            )
        except BaseException:
            store.writes.interrupted(session, incoming)
            raise
        for index, status in enumerate(statuses):
            incoming.statuses[index] = incoming.statuses[index] or status
        corrupt = [index for index, status in enumerate(statuses) if status is Status.CORRUPT]
        now = self._clock.now()
        committed = store.writes.received(session, incoming, corrupt, now)
        remaining = []
        for copy, code in zip(batch, committed.statuses, strict=True):
            status = Status(code)
            if status is not Status.OK:
                store.writes.abort(session, Abort(0, [copy.key]), now)
                self._end(copy, status)
            elif end == num_layers:
                self._copied_bytes += copy.size_bytes
                self._end(copy, Status.OK)
            else:
                remaining.append(copy)
        self._settle()
        return remaining, next((status for status in statuses if status in _SOURCE_TROUBLE), None)

    async def _in_thread(self, function: Callable[..., _T], *arguments: object) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    def _end(self, copy: Copy, status: Status) -> None:
        waiting = self._waiting.pop(copy.key, None)
        if waiting is None:
            return
        self._outcomes[status] += 1
        for reply, index in waiting:
            reply.close(index, status)


def _let_go(client: StoreClient) -> None:
    """Leases end with the next read otherwise, and who knows when that is."""
    if (plane := client.plane) is not None:
        plane.settle()


def _describe(client: StoreClient, copies: Sequence[Copy]) -> list[Copy] | None:
    """Those that the source has whole, with their shapes; None when it cannot be asked."""
    infos = client.describe([copy.source_key for copy in copies])
    if not client.connected:
        return None
    return [
        Copy(copy.key, copy.source_key, copy.parent, info.size_bytes, info.num_layers)
        for copy, info in zip(copies, infos, strict=True)
        if info is not None and info.layers_ready == info.num_layers
    ]


def _read(
    client: StoreClient,
    batch: Sequence[Copy],
    begin: int,
    end: int,
    places: Sequence[list[memoryview] | None],
    timeout_ms: float,
) -> tuple[list[Status], bytes]:
    """Layers into their places, and the packed checksums of what has come. What has no place has lost its
    reservation meanwhile."""
    wanted = [index for index, views in enumerate(places) if views is not None]
    buffers = [views for views in places if views is not None]
    keys = [batch[index].source_key for index in wanted]
    found = client.read_layers(keys, begin, end, buffers).wait(timeout_ms)
    statuses = [Status.ABANDONED] * len(batch)
    checksums = [0] * (len(batch) * (end - begin))
    for index, status, views in zip(wanted, found, buffers, strict=True):
        statuses[index] = status
        if status is Status.OK:
            first = index * (end - begin)
            checksums[first : first + end - begin] = layer_checksums(views, end - begin)
    return statuses, struct.pack(f"<{len(checksums)}Q", *checksums)
