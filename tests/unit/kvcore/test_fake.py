"""The fakes keep the same contracts as the real planes and clients, and their faults do what they say."""

import threading

import pytest

from kvcore.client.fake import FakeStore, FakeStoreClient
from kvcore.transport.fake import FakeTransport
from kvcore.wire.messages import Status
from tests.contracts.client_contract import LayerwiseStoreContract, key_of
from tests.contracts.transport_contract import TransportContract


class FakePeer:
    def __init__(self, store: FakeStore) -> None:
        self.store = store
        self.transport = FakeTransport(store)

    def reserve(self, keys: list[bytes], size_bytes: int, num_layers: int) -> list[Status]:
        with self.store.changed:
            return [self.store.reserve(self.transport.owner, key, size_bytes, num_layers) for key in keys]

    def abort(self, keys: list[bytes]) -> None:
        with self.store.changed:
            self.store.abort(self.transport.owner, keys)


class FakeRig:
    def __init__(self) -> None:
        self.store = FakeStore()

    def open(self) -> FakePeer:
        return FakePeer(self.store)


class TestFakeTransport(TransportContract):
    @pytest.fixture
    def rig(self) -> FakeRig:
        return FakeRig()


class TestFakeStoreClient(LayerwiseStoreContract):
    @pytest.fixture
    def open_client(self):
        store = FakeStore(capacity_bytes=64 << 20)
        return lambda: FakeStoreClient(store)


def write(client: FakeStoreClient, key: bytes, value: bytes, num_layers: int = 1) -> list[Status]:
    assert client.reserve([key], len(value), num_layers) == [Status.OK]
    return client.write_layers([key], 0, num_layers, [value]).wait()


def test_a_stopped_store_is_a_miss_and_comes_back_empty_or_not():
    client = FakeStoreClient()
    write(client, key_of(1), b"one")
    assert client.reserve([key_of(2)], 3) == [Status.OK]
    client.store.stop(lose_contents=False)
    assert not client.connected and not client.lookup([key_of(1)]).available
    assert client.reserve([key_of(3)], 3) == [Status.UNAVAILABLE]
    client.store.start()
    assert client.lookup([key_of(1), key_of(2)], include_pending=True).num_hits == 1
    client.store.stop()
    client.store.start()
    assert client.lookup([key_of(1)]).num_hits == 0


def test_stopping_wakes_waiters():
    client = FakeStoreClient()
    read = client.read_layers([key_of(1)], 0, 1, [bytearray(3)], wait_ms=60_000)
    timer = threading.Timer(0.05, client.store.stop)
    timer.start()
    assert read.wait() == [Status.UNAVAILABLE]
    timer.join()


def test_a_slow_store_runs_into_deadlines():
    client = FakeStoreClient()
    write(client, key_of(1), b"one")
    client.store.delay_ms = 40
    assert not client.lookup([key_of(1)], timeout_ms=5).available
    assert client.lookup([key_of(1)], timeout_ms=500).num_hits == 1
    read = client.read_layers([key_of(1)], 0, 1, [bytearray(3)])
    assert not read.done()
    assert read.wait(timeout_ms=5) == [Status.TIMED_OUT]
    assert client.read_layers([key_of(1)], 0, 1, [bytearray(3)]).wait() == [Status.OK]


def test_scripted_failures_hit_the_next_key_of_their_kind():
    client = FakeStoreClient()
    write(client, key_of(1), b"one")
    client.store.fail_next("read", Status.CORRUPT)
    client.store.fail_next("reserve", Status.FULL)
    assert client.reserve([key_of(2), key_of(3)], 3) == [Status.FULL, Status.OK]
    buffers = [bytearray(3), bytearray(3)]
    read = client.read_layers([key_of(1), key_of(1)], 0, 1, buffers)
    assert read.wait() == [Status.CORRUPT, Status.OK]
    client.store.lose([key_of(1)])
    assert client.lookup([key_of(1)]).num_hits == 0
    with pytest.raises(ValueError, match="operation"):
        client.store.fail_next("lookup", Status.FULL)


def test_a_full_store_says_so():
    client = FakeStoreClient(FakeStore(capacity_bytes=10))
    assert client.reserve([key_of(1)], 11) == [Status.TOO_LARGE]
    assert client.reserve([key_of(1), key_of(2)], 6) == [Status.OK, Status.FULL]
