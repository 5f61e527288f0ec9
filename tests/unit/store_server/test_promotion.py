"""What comes back from the cold tier for a request stays until that request is answered."""

import pytest

from kvcore.wire.messages import Await, Put, Read, Status, StatusReply
from store_server.core.objects import Session
from store_server.core.reads import Served
from store_server.core.store import Store
from tests.unit.store_server.fake_cold import FakeCold, new_tiered_store
from tests.unit.store_server.model import KIB, check_invariants, key, live_objects

OBJECT_BYTES = 32 * KIB
FITTING = 31  # of the 32 objects of this size that a pool of 1 MiB has chunks for; bookkeeping takes the rest


@pytest.fixture
def cold() -> FakeCold:
    return FakeCold()


@pytest.fixture
def store(cold: FakeCold) -> Store:
    return new_tiered_store(cold)


@pytest.fixture
def session(store: Store) -> Session:
    return store.open_session()


def fill_and_spill(store: Store, cold: FakeCold, session: Session, first: int, count: int) -> None:
    """Puts as a client does that waits for room."""
    for number in range(first, first + count):
        request = Put(1, [key(number)], [OBJECT_BYTES])
        while (incoming := store.writes.put_begin(session, request, 0.0, may_wait=True)) is None:
            cold.finish_writes(store)
        assert store.writes.received(session, incoming, (), 0.0).statuses == bytes([Status.OK])
        check_invariants(store)


def spilled(store: Store, cold: FakeCold, session: Session, count: int) -> None:
    """Objects 0 to `count` lie on disk only, and DRAM is empty."""
    fill_and_spill(store, cold, session, 0, count)
    while live_objects(store):
        store.space.evict_some(1000, store.space.capacity_bytes)
        cold.finish_writes(store)


def test_what_came_back_first_waits_for_the_rest_of_its_request(
    store: Store, cold: FakeCold, session: Session
) -> None:
    spilled(store, cold, session, 4)
    assert store.reads.read(session, Read(1, [key(0), key(1)]), 0.0) is None
    cold.finish_loads(store, 1)
    # The one that is there is the only object on disk already, hence the cheapest to forget.
    fill_and_spill(store, cold, session, 100, 2 * FITTING)
    cold.finish_loads(store)
    (ticket,) = store.waiters.finished
    served = store.reads.finish(ticket, 0.0)
    assert isinstance(served, Served) and served.reply.statuses == bytes([Status.OK, Status.OK])
    store.space.release(served.objects)
    assert not any(obj.users for obj in live_objects(store))


def test_a_request_larger_than_dram_gets_what_fits(store: Store, cold: FakeCold, session: Session) -> None:
    spilled(store, cold, session, FITTING + 4)
    keys = [key(number) for number in range(FITTING + 4)]
    assert store.reads.await_layers(session, Await(1, keys, 0, 0), 0.0) is None
    while cold.loading:
        cold.finish_loads(store, 1)
    if not store.waiters.finished:
        store.expire(1000.0)
    (ticket,) = store.waiters.finished
    reply = store.reads.finish(ticket, 0.0)
    assert isinstance(reply, StatusReply)
    assert reply.statuses.count(Status.OK) == FITTING
    assert not any(obj.users for obj in live_objects(store))


@pytest.mark.parametrize("loads", [1, 2])
def test_a_reader_that_leaves_lets_go_of_what_came_back(
    store: Store, cold: FakeCold, session: Session, loads: int
) -> None:
    spilled(store, cold, session, 4)
    reader = store.open_session()
    assert store.reads.read(reader, Read(1, [key(0), key(1)]), 0.0) is None
    cold.finish_loads(store, loads)
    store.close_session(reader)
    cold.finish_loads(store)
    assert not any(obj.users for obj in live_objects(store))
