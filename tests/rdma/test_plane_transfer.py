"""A KV set of 64 blocks and 30 layers moves between two hosts, layer by layer, without the store's
processor."""

import json
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvcore.client.sync_client import StoreClient
from kvcore.wire.messages import Status
from tests.rdma.guest import SERVER_HOST, python_on
from tests.rdma.plane_rig import STORE_DEVICES, OpenClient, opener, tcp_bytes

pytestmark = [pytest.mark.rdma, pytest.mark.slow, pytest.mark.timeout(300)]

BLOCKS, LAYERS, LAYER_BYTES = 64, 30, 128 << 10
SET_BYTES = BLOCKS * LAYERS * LAYER_BYTES
POOL_BYTES = 280 << 20
ROUNDS = 2


class BusyStore:
    """See busy_store.py."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.address = f"{SERVER_HOST.address}:{json.loads(self._read())['port']}"

    def busy_s(self) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._read())

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


@pytest.fixture(scope="module")
def store() -> Iterator[BusyStore]:
    settings = {"host": SERVER_HOST.address, "port": 0, "admin_port": -1, "device_name": STORE_DEVICES}
    program = Path(__file__).with_name("busy_store.py")
    with python_on(SERVER_HOST, program, json.dumps({**settings, "pool_size_bytes": POOL_BYTES})) as process:
        yield BusyStore(process)


@pytest.fixture
def open_client(store: BusyStore) -> Iterator[OpenClient]:
    with opener(store) as open_one:
        yield open_one


class Layer:
    """One layer of an engine's KV cache, registered; its blocks lie scattered over it."""

    def __init__(self, client: StoreClient, seed: int) -> None:
        self._random = np.random.default_rng(seed).integers(0, 256, (BLOCKS, LAYER_BYTES), np.uint8)
        self.places = np.random.default_rng(seed + 1).permutation(BLOCKS)
        self.tensor = np.zeros((BLOCKS, LAYER_BYTES), np.uint8)
        self.blocks = [self.tensor[place] for place in self.places]
        self._region = client.register(self.tensor)

    def compute(self, layer: int) -> None:
        """The bytes of block b of layer l depend on both."""
        np.bitwise_xor(self._random, layer, out=self.tensor)

    def holds(self, other: "Layer", layer: int) -> bool:
        expected = [other._random[place] ^ np.uint8(layer) for place in other.places]
        return all(np.array_equal(found, wanted) for found, wanted in zip(self.blocks, expected, strict=True))

    def close(self) -> None:
        self._region.close()


def keys_of(name: str) -> list[bytes]:
    return [f"{name}{block:04}".encode().ljust(32, b".") for block in range(BLOCKS)]


def move_set(client: StoreClient, source: Layer, target: Layer, keys: list[bytes]) -> None:
    """There and back, a layer at a time, every byte compared."""
    assert client.reserve(keys, LAYERS * LAYER_BYTES, LAYERS) == [Status.OK] * BLOCKS
    for layer in range(LAYERS):
        source.compute(layer)
        written = client.write_layers(keys, layer, layer + 1, source.blocks)
        assert written.wait() == [Status.OK] * BLOCKS, f"layer {layer}"
    for layer in range(LAYERS):
        read = client.read_layers(keys, layer, layer + 1, target.blocks)
        assert read.wait() == [Status.OK] * BLOCKS, f"layer {layer}"
        assert target.holds(source, layer), f"layer {layer} differs"


def test_a_kv_set_moves_both_ways_and_the_store_does_next_to_nothing(
    store: BusyStore, open_client: OpenClient
) -> None:
    spent_s: dict[str, list[float]] = {"tcp": [], "rdma": []}
    for number in range(ROUNDS):
        for plane, spent in spent_s.items():
            client = open_client(planes=(plane, "tcp"))
            source, target, keys = Layer(client, 1), Layer(client, 3), keys_of(f"{plane}{number}")
            busy_before, bytes_before = store.busy_s(), tcp_bytes()
            move_set(client, source, target, keys)
            spent.append(store.busy_s() - busy_before)
            over_tcp = tcp_bytes() - bytes_before
            if plane == "rdma":
                assert over_tcp < 0.01 * 2 * SET_BYTES
                assert client.counters()["rdma_moved_bytes_total"] == 2 * SET_BYTES
                assert client.counters()["rdma_inline_keys_total"] == 0
            assert client.batch_remove(keys) == [Status.OK] * BLOCKS
            source.close()
            target.close()
            client.close()
    # What the machine did besides counts as well: the round that was disturbed least says most.
    least_s = {plane: min(rounds) for plane, rounds in spent_s.items()}
    print(f"the store was busy, for {2 * SET_BYTES >> 20} MiB: {spent_s} s")
    assert least_s["rdma"] < 0.05 * least_s["tcp"], spent_s


def test_a_reader_follows_the_writer_layer_by_layer(open_client: OpenClient) -> None:
    writer, reader, keys = open_client(), open_client(), keys_of("follow")
    source, target = Layer(writer, 1), Layer(reader, 3)
    layers_read = threading.Semaphore(0)
    outcome: list[object] = []

    def follow() -> None:
        for layer in range(LAYERS):
            read = reader.read_layers(keys, layer, layer + 1, target.blocks, wait_ms=60_000)
            statuses = read.wait()
            if statuses != [Status.OK] * BLOCKS or not target.holds(source, layer):
                outcome.append((layer, statuses))
            layers_read.release()

    thread = threading.Thread(target=follow)
    thread.start()
    assert writer.reserve(keys, LAYERS * LAYER_BYTES, LAYERS) == [Status.OK] * BLOCKS
    for layer in range(LAYERS):
        source.compute(layer)
        written = writer.write_layers(keys, layer, layer + 1, source.blocks)
        assert written.wait() == [Status.OK] * BLOCKS
        # The reader gets this layer although the next has not even been computed.
        assert layers_read.acquire(timeout=60)
    thread.join(60)
    assert outcome == []
    assert reader.counters()["rdma_moved_bytes_total"] == SET_BYTES
