"""The rdma plane against a real store, over fake devices: its contract, and what happens when they fail."""

import pytest

from kvcore.client.sync_client import StoreClient
from kvcore.wire.messages import Status
from tests.contracts.client_contract import LayerwiseStoreContract, ObjectStoreContract
from tests.contracts.transport_contract import TransportContract
from tests.integration.fake_rdma import fabric as fabric
from tests.integration.fake_rdma import open_any_client as open_any_client
from tests.integration.fake_rdma import rdma_store as rdma_store


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
    def __init__(self, open_any_client) -> None:
        self.open_any_client = open_any_client

    def open(self) -> Peer:
        client = self.open_any_client()
        client.plane.inline_read_bytes = client.plane.inline_put_bytes = 0
        return Peer(client)


class TestRdmaPlane(TransportContract):
    @pytest.fixture
    def rig(self, open_any_client):
        return Rig(open_any_client)


class TestRdmaClient(LayerwiseStoreContract, ObjectStoreContract):
    @pytest.fixture
    def open_client(self, open_any_client):
        def open_one() -> StoreClient:
            client = open_any_client()
            client.plane.inline_read_bytes = client.plane.inline_put_bytes = 0
            return client

        return open_one
