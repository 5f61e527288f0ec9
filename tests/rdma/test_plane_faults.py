"""Wires, cards, keys and stores fail: requests complete another way or are misses in time, and RDMA comes
back."""

import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvcore.client.sync_client import StoreClient
from kvcore.transport import rdma_path, verbs_sysfs
from kvcore.wire.messages import Status
from tests.integration.store_process import StoreProcess
from tests.rdma.guest import CLIENT_HOST, WIRES, Faults, count_rdma
from tests.rdma.plane_rig import (
    DEADLINE_S,
    OpenClient,
    eventually,
    move_everything,
    opener,
    store_on_server,
)

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(300)]

KEYS = [f"f{number}".encode().ljust(32, b".") for number in range(16)]
SIZE_BYTES = 512 << 10


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    with store_on_server(tmp_path_factory.mktemp("store"), pool="96mb") as store:
        yield store


@pytest.fixture
def open_client(store: StoreProcess, faults: Faults) -> Iterator[OpenClient]:
    with opener(store) as open_one:
        yield open_one
        faults.mend()


class Set:
    """Objects in registered memory, and how to move them."""

    def __init__(self, client: StoreClient, name: str, seed: int = 0) -> None:
        self.client = client
        self.plane = move_everything(client)
        self.keys = [key.replace(b"f", name.encode(), 1) for key in KEYS]
        self.tensor = np.zeros((len(KEYS), SIZE_BYTES), np.uint8)
        if seed:
            random = np.random.default_rng(seed)
            self.tensor[:] = random.integers(0, 256, self.tensor.shape, np.uint8)
        client.register(self.tensor)

    def reserve(self) -> "Set":
        assert self.client.reserve(self.keys, SIZE_BYTES) == [Status.OK] * len(KEYS)
        return self

    def write(self) -> list[Status]:
        return self.client.write_layers(self.keys, 0, 1, list(self.tensor)).wait()

    def read(self, timeout_ms: float | None = None) -> list[Status]:
        return self.client.read_layers(self.keys, 0, 1, list(self.tensor)).wait(timeout_ms)

    def counter(self, name: str) -> int:
        return int(self.client.counters()[name])

    def moved_bytes(self) -> int:
        return self.counter("rdma_moved_bytes_total")

    def is_whole_again(self) -> bool:
        return self.counter("rdma_paths_live") == self.counter("rdma_paths")


ALL_OK = [Status.OK] * len(KEYS)


def stored(open_client: OpenClient, name: str) -> Set:
    source = Set(open_client(), name, seed=1).reserve()
    assert source.write() == ALL_OK
    return source


def reader_of(open_client: OpenClient, source: Set, **options: object) -> Set:
    target = Set(open_client(**options), "?")
    target.keys = source.keys
    return target


def assert_rdma_works_again(target: Set, source: Set) -> None:
    eventually(target.is_whole_again)
    before = target.moved_bytes()
    target.tensor[:] = 0
    assert target.read() == ALL_OK
    assert np.array_equal(target.tensor, source.tensor)
    assert target.moved_bytes() - before == source.tensor.nbytes


def test_lost_packets_are_sent_again(open_client: OpenClient, faults: Faults) -> None:
    source = Set(open_client(), "l", seed=1).reserve()
    target = reader_of(open_client, source)
    faults.loss(2)
    assert source.write() == ALL_OK
    assert target.read() == ALL_OK
    assert np.array_equal(target.tensor, source.tensor)


@pytest.mark.parametrize("operation", ["write", "read"])
def test_without_a_wire_the_bytes_go_over_tcp_and_with_one_over_rdma_again(
    open_client: OpenClient, faults: Faults, operation: str
) -> None:
    source = Set(open_client(), f"w{operation[0]}", seed=1).reserve()
    target = reader_of(open_client, source)
    if operation == "read":
        assert source.write() == ALL_OK
    faults.down("rh0", "rh2")
    if operation == "write":
        assert source.write() == ALL_OK
        assert source.counter("rdma_inline_keys_total") == len(KEYS)
    assert target.read() == ALL_OK
    assert np.array_equal(target.tensor, source.tensor)
    assert target.client.counters()["plane"] == "rdma" and target.client.counters()["rdma_last_error"]
    faults.up("rh0", "rh2")
    assert_rdma_works_again(target, source)


@pytest.mark.parametrize("end", WIRES[1], ids=["here", "there"])
def test_a_wire_is_cut_in_the_middle_and_the_other_one_takes_over(
    open_client: OpenClient, faults: Faults, end: str
) -> None:
    source = Set(open_client(), f"c{end}", seed=1).reserve()
    outcome: list[list[Status]] = []
    faults.delay(100, "rh2", "rh3")  # so that there is a middle
    mover = threading.Thread(target=lambda: outcome.append(source.write()))
    mover.start()
    eventually(lambda: source.moved_bytes() > 0)
    assert source.moved_bytes() < source.tensor.nbytes
    faults.down(end)
    mover.join(DEADLINE_S)
    assert outcome == [ALL_OK]
    assert source.counter("rdma_inline_keys_total") == 0 and source.counter("rdma_retried_loads_total") > 0
    assert source.moved_bytes() == source.tensor.nbytes
    faults.mend()
    target = reader_of(open_client, source)
    assert target.read() == ALL_OK
    assert np.array_equal(target.tensor, source.tensor)
    eventually(source.is_whole_again)


def test_a_bad_key_costs_a_queue_pair_and_no_request(open_client: OpenClient) -> None:
    source = stored(open_client, "k")
    target = reader_of(open_client, source)
    for path in target.plane.mover.paths:
        path._live.remote_key ^= 0x5A5A00
    assert target.read() == ALL_OK
    assert np.array_equal(target.tensor, source.tensor)
    assert target.counter("rdma_inline_keys_total") == len(KEYS)
    assert "access refused by the peer" in target.client.counters()["rdma_last_error"]
    assert_rdma_works_again(target, source)


def test_when_nothing_gets_through_it_is_a_miss_in_time(open_client: OpenClient, faults: Faults) -> None:
    source = stored(open_client, "n")
    target = reader_of(open_client, source)
    faults.loss(100)
    faults.loss(100, "th0")
    began = time.monotonic()
    assert target.read(timeout_ms=1500) == [Status.TIMED_OUT] * len(KEYS)
    assert time.monotonic() - began < 10
    target.tensor[:] = 7
    faults.mend()
    eventually(lambda: target.read() == ALL_OK)
    eventually(target.is_whole_again)
    assert np.array_equal(target.tensor, source.tensor)


def test_a_store_that_is_killed_is_a_miss_and_its_successor_is_used(tmp_path: Path) -> None:
    with store_on_server(tmp_path, pool="32mb") as store, opener(store) as open_client:
        source = stored(open_client, "s")
        store.kill()
        began = time.monotonic()
        assert set(source.read()) <= {Status.UNAVAILABLE, Status.TIMED_OUT}
        assert time.monotonic() - began < 20
        store.start()
        eventually(lambda: source.client.connected and source.client.counters()["plane"] == "rdma")
        again = Set(source.client, "t", seed=2).reserve()
        assert again.write() == ALL_OK
        assert again.moved_bytes() == again.tensor.nbytes


def test_a_card_that_vanishes_leaves_its_work_to_the_other(
    store: StoreProcess, take_card_away: Callable[[], None]
) -> None:
    with opener(store) as open_client:
        source = Set(open_client(), "v", seed=1).reserve()
        take_card_away()
        assert source.write() == ALL_OK
        assert source.counter("rdma_inline_keys_total") == 0
        assert source.counter("rdma_paths_live") == 1
        target = reader_of(open_client, source, device_name=CLIENT_HOST.devices[0])
        assert target.read() == ALL_OK and np.array_equal(target.tensor, source.tensor)


@pytest.fixture
def take_card_away() -> Iterator[Callable[[], None]]:
    """The client's second device: its interface leaves, and the kernel with it takes the device away."""
    is_taken = False

    def run(*words: str) -> None:
        subprocess.run(["nsenter", "--net=/proc/1/ns/net", *words], check=True, timeout=DEADLINE_S)

    def take() -> None:
        nonlocal is_taken
        is_taken = True
        run("ip", "link", "set", "rh2", "netns", CLIENT_HOST.name)

    yield take
    if is_taken:
        subprocess.run(["ip", "link", "set", "rh2", "netns", "1"], check=True, timeout=DEADLINE_S)
        run("ip", "address", "add", "10.77.1.1/24", "dev", "rh2")
        run("rdma-fault", "up", "rh2")
        eventually(lambda: not Path("/sys/class/infiniband/rxe2").exists())
        run("rdma", "link", "add", "rxe2", "type", "rxe", "netdev", "rh2")
        eventually(lambda: verbs_sysfs.is_active("rxe2"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_thousand_reconnects_leave_nothing_behind(
    open_client: OpenClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rdma_path, "FIRST_PAUSE_S", 0.001)
    source = stored(open_client, "r")
    target = reader_of(open_client, source)
    path = target.plane.mover.paths[0]

    def resources() -> dict[str, int]:
        return {kind: count_rdma(kind) for kind in ("qp", "cq", "mr", "pd")}

    def memory_kib() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4

    def reconnect(times: int) -> None:
        for _ in range(times):
            connects = path.num_connects
            path._break("a test")
            eventually(lambda: path.num_connects > connects and path.is_live)  # noqa: B023

    reconnect(50)
    before, memory_before = resources(), memory_kib()
    reconnect(1000)
    assert resources() == before
    assert memory_kib() - memory_before < 8 << 10
    assert target.read() == ALL_OK and np.array_equal(target.tensor, source.tensor)
