"""Copies from store to store on the rdma plane, over fake devices; tests/rdma has them over real verbs."""

from collections.abc import Iterator

import numpy as np
import pytest

from kvcore import metrics
from kvcore.client.sync_client import StoreClient
from kvcore.transport import rdma_host
from kvcore.transport.verbs import Opcode
from kvcore.transport.verbs_fake import FakeChain, FakeFabric, FakeQueuePair
from kvcore.wire.messages import Status
from tests.integration.fake_rdma import FakeRdmaStore
from tests.integration.store_harness import eventually
from tests.integration.store_process import PATIENT

NUM_KEYS, LAYERS, SIZE_BYTES = 16, 4, 256 << 10
KEYS = [bytes([number]) * 32 for number in range(NUM_KEYS)]
VALUES = np.random.default_rng(7).integers(0, 256, (NUM_KEYS, SIZE_BYTES), np.uint8)
ALL_OK = [Status.OK] * NUM_KEYS
WAIT_MS = 60_000
PEERS = {"answer_timeout_ms": 60_000, "timeout_ms": 120_000}


class CountingFabric(FakeFabric):
    def __init__(self, *device_names: str) -> None:
        super().__init__(*device_names)
        self.read_bytes: dict[str, int] = {}
        """By device, of those that posted the requests."""

    def carry(self, pair: FakeQueuePair, chain: FakeChain) -> None:
        assert chain.content is not None
        opcode, _, operations, *_ = chain.content
        if opcode == Opcode.READ:
            size_bytes = sum(operation[1] for operation in operations)
            self.read_bytes[pair.device.name] = self.read_bytes.get(pair.device.name, 0) + size_bytes
        super().carry(pair, chain)


@pytest.fixture
def fabric(monkeypatch: pytest.MonkeyPatch) -> CountingFabric:
    fabric = CountingFabric("nobodys", "source0", "source1", "target0", "target1")
    monkeypatch.setattr(rdma_host, "load_binding", lambda: fabric)
    return fabric


@pytest.fixture
def source(fabric: CountingFabric) -> Iterator[FakeRdmaStore]:
    store = FakeRdmaStore(fabric, device_name="source0,source1")
    with StoreClient.connect(store.address, planes=("tcp",), **PATIENT) as client:
        assert client.reserve(KEYS, SIZE_BYTES, LAYERS) == ALL_OK
        assert client.write_layers(KEYS, 0, LAYERS, list(VALUES)).wait() == ALL_OK
    yield store
    store.stop()


@pytest.fixture
def target(fabric: CountingFabric) -> Iterator[FakeRdmaStore]:
    store = FakeRdmaStore(fabric, device_name="target0,target1", peers=PEERS)
    yield store
    store.stop()


@pytest.fixture
def asking(target: FakeRdmaStore) -> Iterator[StoreClient]:
    with StoreClient.connect(target.address, planes=("tcp",), **PATIENT) as client:
        yield client


def assert_all_there(client: StoreClient) -> None:
    assert [client.get(key) for key in KEYS] == [value.tobytes() for value in VALUES]
    assert client.verify(start=True) is not None
    report = eventually(lambda: (one := client.verify()) is not None and not one.is_running and one)
    assert (report.num_corrupt, report.num_unchecked) == (0, 0)


def test_the_bytes_come_by_the_targets_own_devices(
    source: FakeRdmaStore, target: FakeRdmaStore, asking: StoreClient, fabric: CountingFabric
) -> None:
    assert asking.copy_from(KEYS, source.address, wait_ms=WAIT_MS) == ALL_OK
    assert fabric.read_bytes.keys() == {"target0", "target1"}
    # Each new path carries a few bytes to see whether it works.
    assert 0 <= sum(fabric.read_bytes.values()) - VALUES.nbytes < 100
    assert_all_there(asking)
    eventually(lambda: source.stats()[metrics.LEASES] == 0)


def test_without_a_wire_they_come_over_tcp(
    source: FakeRdmaStore, target: FakeRdmaStore, asking: StoreClient, fabric: CountingFabric
) -> None:
    first = KEYS[:1]
    assert asking.copy_from(first, source.address, wait_ms=WAIT_MS) == [Status.OK]
    for name in ("source0", "source1"):
        fabric.devices[name].active = False
    assert asking.copy_from(KEYS, source.address, wait_ms=WAIT_MS) == ALL_OK
    assert_all_there(asking)


def test_a_device_that_has_gone_costs_the_plane_and_not_the_copy(
    source: FakeRdmaStore, target: FakeRdmaStore, asking: StoreClient, fabric: CountingFabric
) -> None:
    del fabric.devices["target1"]
    assert asking.copy_from(KEYS, source.address, wait_ms=WAIT_MS) == ALL_OK
    assert not fabric.read_bytes
    assert_all_there(asking)


def test_wires_cut_in_the_middle_cost_nothing_but_the_plane(
    source: FakeRdmaStore, target: FakeRdmaStore, asking: StoreClient, fabric: CountingFabric
) -> None:
    fabric.hold()
    assert set(asking.copy_from(KEYS, source.address)) == {Status.PENDING}
    eventually(lambda: fabric.read_bytes)
    for name in ("source0", "source1"):
        fabric.devices[name].active = False
    fabric.deliver()  # nobody answers: the rest comes over TCP
    assert asking.copy_from(KEYS, source.address, wait_ms=WAIT_MS) == ALL_OK
    assert_all_there(asking)
