"""The contracts of planes and clients over real verbs, with each binding."""

from collections.abc import Iterator

import pytest

from kvcore.client.sync_client import StoreClient
from kvcore.transport import rdma_host
from kvcore.transport.verbs import load_binding
from tests.contracts.client_contract import LayerwiseStoreContract, ObjectStoreContract
from tests.contracts.transport_contract import TransportContract
from tests.integration.store_process import StoreProcess
from tests.rdma.plane_rig import OpenClient, Rig, move_everything, opener, store_on_server

pytestmark = pytest.mark.rdma


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    with store_on_server(tmp_path_factory.mktemp("store"), pool="96mb") as store:
        yield store


@pytest.fixture(params=["ibverbs", "pyverbs"])
def open_any_client(
    store: StoreProcess, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[OpenClient]:
    monkeypatch.setattr(rdma_host, "load_binding", lambda: load_binding(request.param))
    with opener(store) as open_one:
        yield open_one


class TestRdmaPlane(TransportContract):
    @pytest.fixture
    def rig(self, open_any_client: OpenClient) -> Rig:
        return Rig(open_any_client)


class TestRdmaClient(LayerwiseStoreContract, ObjectStoreContract):
    @pytest.fixture
    def open_client(self, open_any_client: OpenClient) -> OpenClient:
        def open_one() -> StoreClient:
            client = open_any_client()
            move_everything(client)
            return client

        return open_one
