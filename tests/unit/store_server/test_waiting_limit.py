"""How many keys the parked requests of one connection may wait for."""

import pytest

from kvcore.errors import RequestRefused
from kvcore.wire.messages import Await, ErrorCode, Read
from tests.unit.store_server.model import KIB, key, new_store, put


def test_one_connection_cannot_park_without_end() -> None:
    store = new_store(max_waiting_keys=5)
    greedy, modest = store.open_session(), store.open_session()
    assert store.reads.read(greedy, Read(1, [key(1), key(2), key(3)], wait_ms=1000), 0.0) is None
    with pytest.raises(RequestRefused, match="3 keys of this connection") as refusal:
        store.reads.await_layers(greedy, Await(2, [key(4), key(5), key(6)], 1, 1000), 0.0)
    assert refusal.value.code == ErrorCode.OVER_LIMIT and refusal.value.retryable
    assert store.reads.await_layers(greedy, Await(3, [key(4), key(5)], 1, 1000), 0.0) is None
    assert store.reads.read(modest, Read(1, [key(number) for number in range(5)], wait_ms=1000), 0.0) is None


@pytest.mark.parametrize("end", ["answer", "time", "abort"])
def test_a_wait_that_ends_makes_room_for_another(end: str) -> None:
    store = new_store(max_waiting_keys=2)
    session, writer = store.open_session(), store.open_session()
    assert store.reads.read(session, Read(1, [key(1), key(2)], wait_ms=1000), 0.0) is None
    if end == "answer":
        put(store, writer, [key(1), key(2)], KIB)
    elif end == "time":
        store.expire(2.0)
    else:
        store.waiters.resolve(key(1), 5)  # type: ignore[arg-type]
        store.waiters.resolve(key(2), 5)  # type: ignore[arg-type]
    assert session.num_waiting_keys == 0
    assert len(store.waiters.finished) == 1
    assert store.reads.read(session, Read(2, [key(8), key(9)], wait_ms=1000), 2.0) is None
