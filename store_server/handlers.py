"""What each request does: a call of the core, and the few things that only the shell can do."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from kvcore.errors import RequestRefused
from kvcore.wire import messages as m
from store_server.core.reads import Served

if TYPE_CHECKING:
    from store_server.connection import StoreConnection

Answer = m.Reply | Served | None  # None: the answer comes later


def _hello(connection: "StoreConnection", request: m.Hello, now: float) -> m.HelloReply:
    server = connection.server
    connection.session.client_name = request.client_name
    connection.client = server.tenants.client_of(request.token)
    offer = None
    planes = [plane for plane in request.planes if plane in server.config.planes]
    if not connection.client.may_touch_pool:
        planes = [plane for plane in planes if plane not in ("shm", "rdma")]
    rdma = server.rdma.offer if server.rdma is not None and "rdma" in planes else None
    if rdma is None and "rdma" in planes:
        planes.remove("rdma")
    if "shm" in planes:
        offer = server.offer_shm(connection.session, request.host_id)
        if offer is None:
            planes.remove("shm")
    connection.greeted()
    return m.HelloReply(
        request.id,
        version=m.PROTOCOL_VERSION,
        server_id=server.server_id,
        planes=planes,
        max_body_bytes=server.config.max_body_bytes,
        max_payload_bytes=server.config.max_payload_bytes,
        max_keys=server.config.max_keys,
        default_lease_ms=server.config.default_lease_ms,
        shm=offer,
        rdma=rdma,
    )


def _reserve(connection: "StoreConnection", request: m.Reserve, now: float) -> m.ReserveReply | None:
    """Waits while room is being made; other requests of the client go on meanwhile."""
    store, session, clock = connection.server.store, connection.session, connection.server.clock

    def attempt(is_last: bool) -> bool:
        reply: m.Reply | None
        try:
            reply = store.writes.reserve(session, request, clock.now(), may_wait=not is_last)
        except RequestRefused as error:
            reply = m.ErrorReply(request.id, error.code, str(error), error.retryable)
        if reply is not None:
            connection.send(reply)
        return reply is not None

    if not len(store.room):
        reply = store.writes.reserve(session, request, now, may_wait=True)
        if reply is not None:
            return reply
    store.room.park(session, attempt, now)
    return None


def _connect_queue_pair(connection: "StoreConnection", request: m.ConnectQueuePair, now: float) -> None:
    rdma = connection.server.rdma
    if rdma is None or not connection.client.may_touch_pool:
        raise RequestRefused(m.ErrorCode.FORBIDDEN, "the rdma plane is not offered to this client")
    rdma.connect(connection.session, request, connection.send)


def _disconnect_queue_pair(
    connection: "StoreConnection", request: m.DisconnectQueuePair, now: float
) -> m.Ack:
    if connection.server.rdma is not None:
        connection.server.rdma.disconnect(connection.session, request)
    return m.Ack(request.id)


def _evict(connection: "StoreConnection", request: m.Evict, now: float) -> None:
    connection.server.evict(request, connection.client.prefix, connection.send)


def _change_replica(connection: "StoreConnection", request: m.ChangeReplica, now: float) -> m.Reply | None:
    return connection.server.replicas.change(request, connection.send)


def _copy_from(connection: "StoreConnection", request: m.CopyFrom, now: float) -> m.Reply | None:
    return connection.server.copies.copy(request, connection.client, connection.send)


def _stats(connection: "StoreConnection", request: m.Stats, now: float) -> m.StatsReply:
    server, client = connection.server, connection.client
    return m.StatsReply(
        request.id, server.stats() if client.is_operator else server.tenant_stats(client.prefix)
    )


def _list_keys(connection: "StoreConnection", request: m.ListKeys, now: float) -> m.ListKeysReply:
    return connection.server.store.upkeep.list_keys(request, connection.client.prefix)


def _describe(connection: "StoreConnection", request: m.Describe, now: float) -> m.DescribeReply:
    return connection.server.store.upkeep.describe(request, connection.client.prefix)


def _resolve(connection: "StoreConnection", request: m.Resolve, now: float) -> m.ResolveReply:
    events = connection.server.events
    names = events.names if events is not None else None
    keys = names.keys_of(request.block_hashes, connection.client.prefix) if names is not None else []
    return m.ResolveReply(request.id, keys)


def _check_operator(connection: "StoreConnection") -> None:
    if not connection.client.is_operator:
        raise RequestRefused(m.ErrorCode.FORBIDDEN, "this is for the store's operator, with its own token")


def _drain(connection: "StoreConnection", request: m.Drain, now: float) -> m.DrainReply:
    _check_operator(connection)
    drainer = connection.server.drainer
    drainer.start(stop=request.stop)
    return msgspec.structs.replace(drainer.report(), id=request.id)


def _verify(connection: "StoreConnection", request: m.Verify, now: float) -> m.VerifyReply:
    _check_operator(connection)
    checker = connection.server.checker
    if request.remote_bytes_per_s < 0:
        raise RequestRefused(
            m.ErrorCode.BAD_REQUEST, "the remote cannot be read at less than 0 bytes a second"
        )
    if request.start:
        checker.start(request.remote_bytes_per_s)
    return msgspec.structs.replace(checker.report(), id=request.id)


HANDLERS: dict[type, Callable[["StoreConnection", Any, float], Answer]] = {
    m.Hello: _hello,
    m.Lookup: lambda conn, request, now: conn.server.store.reads.lookup(request),
    m.Exists: lambda conn, request, now: conn.server.store.reads.exists(request),
    m.Reserve: _reserve,
    m.Commit: lambda conn, request, now: conn.server.store.writes.commit(conn.session, request, now),
    m.Abort: lambda conn, request, now: conn.server.store.writes.abort(conn.session, request, now),
    m.Read: lambda conn, request, now: conn.server.store.reads.read(conn.session, request, now),
    m.Await: lambda conn, request, now: conn.server.store.reads.await_layers(conn.session, request, now),
    m.Acquire: lambda conn, request, now: conn.server.store.reads.acquire(conn.session, request, now),
    m.Renew: lambda conn, request, now: conn.server.store.reads.renew(conn.session, request, now),
    m.Release: lambda conn, request, now: conn.server.store.reads.release(conn.session, request),
    m.Pin: lambda conn, request, now: conn.server.store.upkeep.pin(request, now),
    m.Unpin: lambda conn, request, now: conn.server.store.upkeep.unpin(request),
    m.Remove: lambda conn, request, now: conn.server.store.upkeep.remove(request),
    m.Evict: _evict,
    m.ChangeReplica: _change_replica,
    m.CopyFrom: _copy_from,
    m.ListKeys: _list_keys,
    m.Stats: _stats,
    m.Drain: _drain,
    m.Verify: _verify,
    m.Describe: _describe,
    m.Resolve: _resolve,
    m.ConnectQueuePair: _connect_queue_pair,
    m.DisconnectQueuePair: _disconnect_queue_pair,
}
"""Put and Write are not among them: their payload comes first, see connection.py."""
