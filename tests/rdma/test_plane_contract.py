"""The contracts of planes and clients over real verbs, with each binding."""

from collections.abc import Iterator

import pytest

from kvcore.client.sync_client import StoreClient
from kvcore.transport import rdma_host
from kvcore.transport.verbs import load_binding
from tests.contracts.client_contract import LayerwiseStoreContract, ObjectStoreContract
from tests.contracts.transport_contract import TransportContract
from tests.integration.store_process import StoreProcess
from tests.rdma.guest import SERVER_HOST
from tests.rdma.plane_rig import STORE_DEVICES, OpenClient, Rig, move_everything, opener

pytestmark = pytest.mark.rdma


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    store = StoreProcess(
        tmp_path_factory.mktemp("store"),
        *("--device-name", STORE_DEVICES),
        pool="96mb",
        host=SERVER_HOST.address,
        enter=SERVER_HOST.enter,
    ).start()
    yield store
    assert store.stop() == 0


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
