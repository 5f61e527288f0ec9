"""The client and its planes keep their contracts against a real store, over tcp, shm and a Unix socket."""

import contextlib

import pytest

from kvcore.client.sync_client import StoreClient
from kvcore.wire.messages import Status
from tests.contracts.client_contract import LayerwiseStoreContract, ObjectStoreContract
from tests.contracts.transport_contract import TransportContract
from tests.integration.store_process import PATIENT, StoreProcess


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    store = StoreProcess(tmp_path_factory.mktemp("store"), pool="96mb").start()
    yield store
    assert store.stop() == 0


class Clients:
    """Opens clients of an emptied store and closes them again."""

    def __init__(self, address: str, planes: tuple[str, ...], inline_bytes: int | None) -> None:
        self.address = address
        self.planes = planes
        self.inline_bytes = inline_bytes
        self.closing = contextlib.ExitStack()
        self().evict()

    def __call__(self) -> StoreClient:
        opened = StoreClient.connect(self.address, planes=self.planes, **PATIENT)
        client = self.closing.enter_context(opened)
        assert client.connected and client.counters()["plane"] == self.planes[0], client.counters()
        if self.inline_bytes is not None:
            client.plane.inline_read_bytes = client.plane.inline_put_bytes = self.inline_bytes
        return client


def opener(address: str, *planes: str, inline_bytes: int | None = None):
    clients = Clients(address, planes, inline_bytes)
    with clients.closing:
        yield clients
        cleaner = clients()
        for info in cleaner.list_keys()[0]:
            cleaner.remove(info.key, force=True)


class Peer:
    def __init__(self, client: StoreClient) -> None:
        assert client.plane is not None
        self.client = client
        self.transport = client.plane

    def reserve(self, keys: list[bytes], size_bytes: int, num_layers: int) -> list[Status]:
        return self.client.reserve(keys, size_bytes, num_layers)

    def abort(self, keys: list[bytes]) -> None:
        self.client.abort(keys)


class Rig:
    def __init__(self, clients: Clients) -> None:
        self.clients = clients

    def open(self) -> Peer:
        return Peer(self.clients())


class OverTcp:
    @pytest.fixture
    def open_client(self, store):
        yield from opener(store.address, "tcp")


class OverUnixSocket:
    @pytest.fixture
    def open_client(self, store):
        yield from opener(store.unix_address, "tcp")


class OverShm:
    @pytest.fixture(params=["mapped", "as by default"])
    def open_client(self, store, request):
        # Small things would go inline; here they go through the mapped pool as well.
        inline_bytes = 0 if request.param == "mapped" else None
        yield from opener(store.address, "shm", "tcp", inline_bytes=inline_bytes)


class AsTransport(TransportContract):
    @pytest.fixture
    def rig(self, open_client):
        return Rig(open_client)


class TestTcpPlane(OverTcp, AsTransport):
    pass


class TestShmPlane(OverShm, AsTransport):
    pass


class TestTcpClient(OverTcp, LayerwiseStoreContract, ObjectStoreContract):
    pass


class TestUnixSocketClient(OverUnixSocket, LayerwiseStoreContract, ObjectStoreContract):
    pass


class TestShmClient(OverShm, LayerwiseStoreContract, ObjectStoreContract):
    pass
