"""What the tests of the core share: short requests, and a check that no byte has two owners."""

from kvcore.wire.messages import Abort, Acquire, Commit, Put, Read, Remove, Reserve, Status, Write
from store_server.core.objects import Session, StoredObject
from store_server.core.store import Store, StoreLimits

KIB = 1 << 10


def new_store(pool_size_bytes: int = 4 << 20, **limits: object) -> Store:
    return Store(StoreLimits(pool_size_bytes=pool_size_bytes, **limits))  # type: ignore[arg-type]


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def put(store: Store, session: Session, keys: list[bytes], size_bytes: int, now: float = 0.0) -> list[Status]:
    request = Put(1, keys, [size_bytes] * len(keys))
    incoming = store.writes.put_begin(session, request, now)
    assert incoming is not None
    return [Status(code) for code in store.writes.received(session, incoming, (), now).statuses]


def reserve(
    store: Store, session: Session, keys: list[bytes], size_bytes: int, num_layers: int = 1, now: float = 0.0
) -> list[Status]:
    reply = store.writes.reserve(session, Reserve(1, keys, [size_bytes], num_layers), now)
    assert reply is not None
    return [Status(grant.status) for grant in reply.grants]


def write(
    store: Store,
    session: Session,
    keys: list[bytes],
    begin: int,
    end: int,
    share_bytes: int,
    now: float = 0.0,
) -> list[Status]:
    request = Write(1, keys, begin, end)
    incoming = store.writes.write_begin(session, request, share_bytes * len(keys))
    return [Status(code) for code in store.writes.received(session, incoming, (), now).statuses]


def commit(
    store: Store, session: Session, keys: list[bytes], begin: int, end: int, now: float = 0.0
) -> list[Status]:
    return [Status(code) for code in store.writes.commit(session, Commit(1, keys, begin, end), now).statuses]


def abort(store: Store, session: Session, keys: list[bytes]) -> list[Status]:
    return [Status(code) for code in store.writes.abort(session, Abort(1, keys), 0.0).statuses]


def remove(store: Store, keys: list[bytes], *, force: bool = False) -> list[Status]:
    return [Status(code) for code in store.upkeep.remove(Remove(1, keys, force)).statuses]


def read(store: Store, session: Session, keys: list[bytes], begin: int = 0, end: int = 0) -> list[Status]:
    """Reads without waiting; the bytes count as sent at once."""
    served = store.reads.read(session, Read(1, keys, begin, end), 0.0)
    assert served is not None
    store.space.release(served.objects)
    return [Status(code) for code in served.reply.statuses]


def acquire(store: Store, session: Session, keys: list[bytes], now: float = 0.0) -> int:
    reply = store.reads.acquire(session, Acquire(1, keys, 1000), now)
    assert reply is not None
    return reply.lease


def live_objects(store: Store) -> set[StoredObject]:
    """Everything that owns bytes, also what has left the catalogue but is still used."""
    allocator = store.space.allocator
    return {
        owner for slab in allocator._slabs if slab is not None for owner in slab.owners if owner is not None
    }


def check_invariants(store: Store) -> None:
    allocator = store.space.allocator
    objects = live_objects(store)
    assert set(store.catalog.by_key.values()) <= objects, "an object in the catalogue owns no bytes"
    assert all(obj.users > 0 for obj in objects if obj.gone), "bytes of a forgotten object are leaked"
    end = 0
    for offset, size in sorted(
        span for obj in objects for span in zip(obj.extents[::2], obj.extents[1::2], strict=True)
    ):
        assert offset >= end, "two objects share bytes"
        end = offset + size
    assert end <= allocator.size_bytes
    assert allocator.requested_bytes == sum(obj.size_bytes for obj in objects)
    assert allocator.used_bytes == sum(allocator.cost_bytes(obj.size_bytes) for obj in objects)
    policies = (store.space._policy, store.space._soft_policy)
    for obj in store.catalog.by_key.values():
        ordered = [obj.key in order for order in (*policies, store.space.write_back)]
        assert sum(ordered) == (1 if obj.is_sealed and obj.pin != 2 else 0)
    assert sum(map(len, policies)) <= len(store.catalog.by_key)
    unsealed = {obj.key for obj in store.catalog.by_key.values() if not obj.is_sealed}
    assert store.catalog._unsealed == unsealed
    write_back = store.space.write_back
    assert write_back.in_flight_bytes == sum(obj.size_bytes for obj in write_back._in_flight.values())
    assert write_back.ready_bytes == sum(obj.size_bytes for obj in write_back._ready.values())
    assert all(store.catalog.by_key.get(obj.key) is obj for obj in write_back._ready.values())
