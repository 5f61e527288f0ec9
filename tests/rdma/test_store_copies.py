"""Stores copy objects from each other over RDMA; without wires, and without a source, nothing is wrong."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvcore import metrics
from kvcore.client.sync_client import StoreClient
from kvcore.wire.messages import Status
from tests.integration.store_process import PATIENT, StoreProcess
from tests.rdma.guest import CLIENT_HOST, SERVER_HOST, Faults, count_rdma
from tests.rdma.plane_rig import CLIENT_DEVICES, eventually, store_on_server, tcp_bytes

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(300)]

NUM_KEYS, LAYERS, SIZE_BYTES = 24, 4, 512 << 10
OK, PENDING = Status.OK, Status.PENDING
# On a busy machine silence is no sign of death.
PEERS = ("--peers.answer-timeout-ms", "60s", "--peers.timeout-ms", "120s")
WAIT_MS = 60_000
ALL_OK = [OK] * NUM_KEYS


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    with store_on_server(tmp_path_factory.mktemp("source")) as store:
        yield store


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    """On h0, as the tests."""
    devices = ("--device-name", CLIENT_DEVICES)
    folder = tmp_path_factory.mktemp("target")
    store = StoreProcess(folder, *PEERS, *devices, pool="64mb", host=CLIENT_HOST.address).start()
    yield store
    store.stop()


class Objects:
    """In the source, of layers that all differ."""

    def __init__(self, source: StoreProcess, name: str) -> None:
        self.keys = [f"{name}{number:03}".encode().ljust(32, b".") for number in range(NUM_KEYS)]
        seed = int.from_bytes(name.encode(), "big")
        self.values = np.random.default_rng(seed).integers(0, 256, (NUM_KEYS, SIZE_BYTES), np.uint8)
        with StoreClient.connect(source.address, planes=("tcp",), **PATIENT) as client:
            assert client.reserve(self.keys, SIZE_BYTES, LAYERS) == ALL_OK
            assert client.write_layers(self.keys, 0, LAYERS, list(self.values)).wait() == ALL_OK

    def are_in(self, client: StoreClient) -> bool:
        found = [client.get(key) for key in self.keys]
        return found == [value.tobytes() for value in self.values]

    def remove_from(self, *stores: StoreProcess) -> None:
        for store in stores:
            with StoreClient.connect(store.address, planes=("tcp",), **PATIENT) as client:
                for key in self.keys:
                    client.remove(key, force=True)


def devices_of_pairs() -> list[str]:
    """Of each connected queue pair in the guest, also of those whose maker, a thread, has ended."""
    shown = subprocess.run(["rdma", "resource", "show", "qp"], capture_output=True, text=True, check=True)
    return sorted(
        line.split()[1].partition("/")[0] for line in shown.stdout.splitlines() if " type RC " in line
    )


@pytest.fixture
def asking(target: StoreProcess) -> Iterator[StoreClient]:
    """A client of the target, over h0's loopback."""
    with StoreClient.connect(target.address, planes=("tcp",), **PATIENT) as client:
        yield client


def test_the_bytes_come_by_the_cards(source: StoreProcess, target: StoreProcess, asking: StoreClient) -> None:
    objects = Objects(source, "cards")
    before = tcp_bytes()
    assert asking.copy_from(objects.keys, source.address, wait_ms=WAIT_MS) == ALL_OK
    assert tcp_bytes() - before < objects.values.nbytes // 10
    # One at each end of each of the two wires, on the devices that the stores were given.
    assert devices_of_pairs() == sorted([*CLIENT_HOST.devices, *SERVER_HOST.devices])
    assert objects.are_in(asking)
    assert asking.verify(start=True) is not None
    eventually(lambda: (report := asking.verify()) is not None and not report.is_running)
    report = asking.verify()
    assert report is not None and (report.num_corrupt, report.num_unchecked) == (0, 0)
    objects.remove_from(source, target)


def test_without_wires_they_come_over_tcp_and_with_them_by_the_cards_again(
    source: StoreProcess, target: StoreProcess, asking: StoreClient, faults: Faults
) -> None:
    first, second = Objects(source, "down"), Objects(source, "up")
    faults.down()
    assert asking.copy_from(first.keys, source.address, wait_ms=WAIT_MS) == ALL_OK
    assert first.are_in(asking)
    first.remove_from(source, target)
    faults.mend()

    def comes_by_the_cards() -> bool:
        second.remove_from(target)
        before = tcp_bytes()
        assert asking.copy_from(second.keys, source.address, wait_ms=WAIT_MS) == ALL_OK
        moved = tcp_bytes() - before
        assert second.are_in(asking)
        return moved < second.values.nbytes // 10

    eventually(comes_by_the_cards)
    second.remove_from(source, target)


def test_a_source_that_is_killed_leaves_nothing_half_copied(
    target: StoreProcess, asking: StoreClient, faults: Faults, tmp_path: Path
) -> None:
    with store_on_server(tmp_path) as mortal:
        objects, pairs = Objects(mortal, "mortal"), count_rdma("qp")
        faults.delay(20)  # so that there is a middle
        assert set(asking.copy_from(objects.keys, mortal.address)) <= {OK, PENDING}
        eventually(lambda: count_rdma("qp") > pairs)
        mortal.kill()
        faults.mend()
        statuses = asking.copy_from(objects.keys, mortal.address, wait_ms=WAIT_MS)
        assert PENDING not in statuses
        for key, value, status in zip(objects.keys, objects.values, statuses, strict=True):
            found = asking.get(key)
            assert found is None if status is not OK else found == value.tobytes()
        # What is there is whole, by its own checksums too.
        assert all(info is None or info.layers_ready == LAYERS for info in asking.describe(objects.keys))
        objects.remove_from(target)
        eventually(lambda: asking.stats()[metrics.LEASES] == 0)
        # The same address, another store, with other bytes of the same names.
        mortal.start()
        again = Objects(mortal, "mortal")
        assert asking.copy_from(again.keys, mortal.address, wait_ms=WAIT_MS) == ALL_OK
        assert again.are_in(asking)
        again.remove_from(target)
