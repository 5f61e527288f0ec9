"""What the rdma plane does when devices, keys, wires and clients fail, over fake devices and a real store."""

import time
from pathlib import Path

import numpy as np
import pytest

from kvcore.client.sync_client import StoreClient
from kvcore.metrics import QUARANTINED_BYTES, QUEUE_PAIRS
from kvcore.transport import rdma_host, rdma_path
from kvcore.transport.channel import Call
from kvcore.transport.rdma_mover import LOAD_BYTES
from kvcore.wire.messages import Acquire, DisconnectQueuePair, Status
from tests.integration.fake_rdma import FakeRdmaStore
from tests.integration.fake_rdma import fabric as fabric
from tests.integration.fake_rdma import open_any_client as open_any_client
from tests.integration.fake_rdma import rdma_store as rdma_store
from tests.integration.store_harness import DEADLINE_S, eventually

SIZE_BYTES = 256 << 10
LAYERS = 4
ALL_OK = [Status.OK] * 4


@pytest.fixture(autouse=True)
def _everything_is_mended(fabric):
    yield
    for device in fabric.devices.values():
        device.active, device.is_full = True, False
    fabric.deliver()


class Engine:
    """Four blocks of four layers in registered memory."""

    def __init__(self, client: StoreClient, name: str, seed: int = 0) -> None:
        self.client = client
        self.plane = client.plane
        self.plane.inline_read_bytes = self.plane.inline_put_bytes = 0
        self.keys = [f"{name}{block}".encode().ljust(32, b".") for block in range(4)]
        self.memory = np.zeros((LAYERS, 4, SIZE_BYTES), np.uint8)
        if seed:
            random = np.random.default_rng(seed)
            self.memory[:] = random.integers(0, 256, self.memory.shape, np.uint8)
        client.register(self.memory)

    def reserve(self) -> "Engine":
        assert self.client.reserve(self.keys, LAYERS * SIZE_BYTES, LAYERS) == ALL_OK
        return self

    def write(self, begin: int = 0, end: int = LAYERS):
        blocks = [[self.memory[layer, block] for layer in range(begin, end)] for block in range(4)]
        return self.client.write_layers(self.keys, begin, end, blocks)

    def read(self, begin: int = 0, end: int = LAYERS, wait_ms: int = 0):
        blocks = [[self.memory[layer, block] for layer in range(begin, end)] for block in range(4)]
        return self.client.read_layers(self.keys, begin, end, blocks, wait_ms=wait_ms)

    def reader(self, client: StoreClient) -> "Engine":
        other = Engine(client, "?")
        other.keys = self.keys
        return other

    def counter(self, name: str) -> int:
        return int(self.client.counters()[f"rdma_{name}"])

    def holds(self, other: "Engine") -> bool:
        return bool(np.array_equal(self.memory, other.memory))


@pytest.fixture
def source(open_any_client) -> Engine:
    return Engine(open_any_client(), "s", seed=1).reserve()


@pytest.fixture
def target(source, open_any_client) -> Engine:
    return source.reader(open_any_client())


def test_bytes_move_over_both_devices_and_not_over_the_control_connection(source, target) -> None:
    assert source.write().wait() == ALL_OK and target.read().wait() == ALL_OK
    assert target.holds(source)
    for engine in (source, target):
        assert engine.counter("moved_bytes_total") == source.memory.nbytes
        assert engine.counter("inline_keys_total") == 0 and engine.counter("paths_live") == 2


def test_a_pulled_cable_leaves_the_work_to_the_other_device_until_it_is_back(fabric, source, target) -> None:
    fabric.devices["client1"].active = False
    assert source.write().wait() == ALL_OK and target.read().wait() == ALL_OK
    assert target.holds(source)
    assert source.counter("inline_keys_total") == target.counter("inline_keys_total") == 0
    eventually(lambda: source.counter("paths_live") == 1)
    fabric.devices["client1"].active = True
    eventually(lambda: source.counter("paths_live") == 2 and target.counter("paths_live") == 2)


@pytest.mark.parametrize("end", ["client", "store"])
def test_without_any_cable_everything_goes_over_the_control_connection(
    fabric, source, target, end: str
) -> None:
    for name in ("0", "1"):
        fabric.devices[end + name].active = False
    assert source.write().wait() == ALL_OK and target.read().wait() == ALL_OK
    assert target.holds(source)
    assert source.counter("inline_keys_total") == 4 and source.counter("paths_live") == 0
    # From now on nothing is even tried.
    assert target.client.put("small", b"x" * SIZE_BYTES) is Status.OK
    assert target.client.get("small") == b"x" * SIZE_BYTES
    assert target.client.counters()["rdma_last_error"]
    for name in ("0", "1"):
        fabric.devices[end + name].active = True
    eventually(lambda: target.counter("paths_live") == 2)
    before = target.counter("moved_bytes_total")
    assert target.read().wait() == ALL_OK
    assert target.counter("moved_bytes_total") == before + target.memory.nbytes


def test_a_cable_pulled_in_the_middle(fabric, source, target) -> None:
    fabric.hold()
    write = source.write()
    assert not write.done()
    fabric.devices["client1"].active = False
    fabric.deliver()
    assert write.wait() == ALL_OK
    assert source.counter("retried_loads_total") > 0 and source.counter("inline_keys_total") == 0
    assert target.read().wait() == ALL_OK and target.holds(source)


def test_commits_keep_their_order_although_paths_do_not(fabric, source, target) -> None:
    """Layer 0 has to be sent twice; layers 1 to 3 are there before it."""
    fabric.hold()
    writes = [source.write(layer, layer + 1) for layer in range(LAYERS)]
    first, *rest = fabric.take_held()
    for held in rest:
        fabric.execute(held)
    assert not any(write.done() for write in writes)
    fabric.execute(first)
    assert [write.wait() for write in writes] == [ALL_OK] * LAYERS
    fabric.deliver()
    assert target.read().wait() == ALL_OK and target.holds(source)


def test_after_a_deadline_nothing_is_written_to_the_buffers_any_more(fabric, source, target) -> None:
    assert source.write().wait() == ALL_OK
    fabric.hold()
    read = target.read()
    assert read.wait(timeout_ms=200) == [Status.TIMED_OUT] * 4
    fabric.deliver()
    assert not target.memory.any()
    eventually(lambda: target.counter("paths_live") == 2)
    assert target.read().wait() == ALL_OK and target.holds(source)


def test_after_a_deadline_a_write_is_not_committed(fabric, source, target) -> None:
    fabric.hold()
    assert source.write().wait(timeout_ms=200) == [Status.TIMED_OUT] * 4
    fabric.deliver()
    assert target.read().wait() == [Status.PENDING] * 4


def test_an_abort_waits_until_no_byte_is_on_its_way(fabric, rdma_store, source, target) -> None:
    waiting = target.read(wait_ms=60_000)
    fabric.hold()
    source.write(0, 2)
    source.client.abort(source.keys)
    assert rdma_store.stats()["objects_pending"] == 4
    fabric.deliver()
    assert waiting.wait() == [Status.ABANDONED] * 4
    eventually(lambda: rdma_store.stats()["objects_pending"] == 0)


def test_a_store_that_cannot_be_told_of_a_failed_queue_pair_is_left(source, target, monkeypatch) -> None:
    """Else what is still on the wire could arrive after what is said next."""
    assert source.write().wait() == ALL_OK
    connects = target.client.counters()["connects_total"]
    start = target.plane.channel.start

    def stalling(kind, *arguments, **options):
        if kind is not DisconnectQueuePair:
            return start(kind, *arguments, **options)
        call = Call()
        call.outcome = Status.TIMED_OUT
        return call

    monkeypatch.setattr(target.plane.channel, "start", stalling)
    target.plane.mover.paths[0]._break("a test")
    eventually(lambda: target.client.counters()["connects_total"] > connects and target.client.connected)
    assert target.read().wait() == ALL_OK and target.holds(source)


def test_a_bad_key_costs_queue_pairs_and_no_request(source, target) -> None:
    assert source.write().wait() == ALL_OK
    for path in target.plane.mover.paths:
        path._live.remote_key += 10_000
    assert target.read().wait() == ALL_OK and target.holds(source)
    assert "access refused by the peer" in target.client.counters()["rdma_last_error"]
    eventually(lambda: target.counter("paths_live") == 2)


def test_what_a_vanished_client_still_has_on_the_wire_reaches_nothing(
    fabric, rdma_store: FakeRdmaStore, source, open_any_client
) -> None:
    """The card of the client goes on; its process and its connection are gone."""
    fabric.hold()
    source.write()
    late = fabric.take_held()
    assert late
    fabric.deliver()
    source.plane.channel._socket.shutdown(2)
    eventually(lambda: rdma_store.stats()["objects_pending"] == 0)
    eventually(lambda: rdma_store.stats()[QUARANTINED_BYTES] == 0)
    other = open_any_client(("tcp",))
    values = {f"n{number}": bytes([number]) * (1 << 20) for number in range(60)}
    assert set(other.batch_put_from(list(values), list(values.values()))) == {Status.OK}
    for pair, chain in late:
        # As if the client's end were still there.
        pair.device.pairs[pair.number] = pair
        pair.is_broken = False
        fabric.execute((pair, chain))
        # Perhaps the client's own thread has just closed it.
        pair.device.pairs.pop(pair.number, None)
    assert all(other.get(key) == value for key, value in values.items())


def test_queue_pairs_end_with_their_client(rdma_store, source, target) -> None:
    # Those of the test before may still be on their way out.
    eventually(lambda: rdma_store.stats()[QUEUE_PAIRS] == 4)
    source.client.close()
    eventually(lambda: rdma_store.stats()[QUEUE_PAIRS] == 2)
    target.client.close()
    eventually(lambda: rdma_store.stats()[QUEUE_PAIRS] == 0)


def test_layers_of_a_sealed_set_are_read_under_one_lease(rdma_store, source, target, monkeypatch) -> None:
    assert source.write().wait() == ALL_OK
    asked = []
    start = target.plane.channel.start

    def counting(kind, *arguments, **options):
        asked.append(kind)
        return start(kind, *arguments, **options)

    monkeypatch.setattr(target.plane.channel, "start", counting)
    for layer in range(LAYERS):
        assert target.read(layer, layer + 1).wait() == ALL_OK
    assert target.holds(source)
    assert asked.count(Acquire) == 1
    # The lease has ended with the last layer; nothing stands in the way of removing.
    target.client.plane.settle()
    eventually(lambda: rdma_store.stats()["leases"] == 0)


def test_a_lease_that_is_held_does_not_keep_the_holder_from_removing(source, target) -> None:
    assert source.write().wait() == ALL_OK
    assert target.read(0, 1).wait() == ALL_OK
    assert target.client.batch_remove(target.keys) == ALL_OK
    assert target.read(1, 2).wait() == [Status.MISSING] * 4


def test_large_loads_and_memory_that_nobody_registered(source, target) -> None:
    size_bytes = LOAD_BYTES + 4097
    value = np.random.default_rng(5).bytes(size_bytes)
    assert source.client.put("large", value) is Status.OK
    assert target.client.get("large") == value
    assert source.counter("moved_bytes_total") == target.counter("moved_bytes_total") == size_bytes
    too_large = bytes(rdma_host.BOUNCE_BYTES + 1)
    assert source.client.put("too large", too_large) is Status.OK
    assert target.client.get("too large") == too_large
    assert source.counter("inline_keys_total") == target.counter("inline_keys_total") == 1
    with target.client.get_view("large") as view:
        assert b"".join(view.views) == value


def test_memory_that_no_device_takes_still_moves(fabric, source, target) -> None:
    fabric.devices["client0"].is_full = fabric.devices["client1"].is_full = True
    extra = bytearray(SIZE_BYTES)
    region = source.client.register(extra)
    assert region.size_bytes == SIZE_BYTES
    region.close()
    assert source.write().wait() == ALL_OK and target.read().wait() == ALL_OK
    assert target.holds(source)


def test_reconnecting_keeps_registrations(rdma_store: FakeRdmaStore, source, target) -> None:
    assert source.write().wait() == ALL_OK
    connects = target.client.counters()["connects_total"]
    target.plane.channel._socket.shutdown(2)
    assert target.read().wait() == [Status.UNAVAILABLE] * 4
    eventually(lambda: target.client.counters()["connects_total"] > connects and target.client.connected)
    assert target.client.counters()["plane"] == "rdma"
    assert target.read().wait() == ALL_OK and target.holds(source)
    assert target.counter("moved_bytes_total") == target.memory.nbytes


@pytest.mark.parametrize(
    ("planes", "devices", "plane", "reason"),
    [
        (("rdma", "shm", "tcp"), "client0", "rdma", "first choice"),
        (("shm", "rdma", "tcp"), "client0", "shm", "first choice"),
        (("tcp",), "", "tcp", "first choice"),
    ],
)
def test_planes_are_taken_in_their_order(
    rdma_store, fabric, monkeypatch, planes, devices, plane, reason
) -> None:
    monkeypatch.setattr(rdma_host, "load_binding", lambda: fabric)
    with StoreClient.connect(rdma_store.address, planes=planes, device_name=devices) as client:
        counters = client.counters()
        assert (counters["plane"], counters["plane_reason"]) == (plane, reason)


def test_why_it_is_not_rdma(rdma_store, fabric, monkeypatch) -> None:
    with StoreClient.connect(rdma_store.address) as client:
        assert client.counters()["plane"] == "shm"
        assert "rdma: no RDMA device on this host" in client.counters()["plane_reason"]
    monkeypatch.setattr(rdma_host, "load_binding", lambda: fabric)
    for name in ("0", "1"):
        fabric.devices["store" + name].active = False
    with StoreClient.connect(rdma_store.address, device_name="client0") as client:
        assert client.counters()["plane"] == "shm"
        assert "a first read fails: the peer does not answer" in client.counters()["plane_reason"]
    store = FakeRdmaStore(fabric, planes=("tcp",))
    with StoreClient.connect(store.address, device_name="client0") as client:
        assert client.counters()["plane_reason"].startswith("rdma: the store does not have it")
    store.stop()


def test_a_tenant_may_touch_the_pool_only_if_it_is_told_so(fabric, monkeypatch) -> None:
    monkeypatch.setattr(rdma_host, "load_binding", lambda: fabric)
    tenants = [{"name": "a", "token": "a", "shm": True}, {"name": "b", "token": "b"}]
    store = FakeRdmaStore(fabric, device_name="store0", tenants=tenants, token="operator")
    for token, plane in (("a", "rdma"), ("b", "tcp"), ("operator", "rdma")):
        with StoreClient.connect(store.address, token=token, device_name="client0") as client:
            assert client.counters()["plane"] == plane, token
    store.stop()


def test_a_thousand_reconnects_leave_nothing_behind(fabric, source, target, monkeypatch) -> None:
    monkeypatch.setattr(rdma_path, "FIRST_PAUSE_S", 0.0)
    path = target.plane.mover.paths[0]

    def open_things() -> tuple[int, ...]:
        descriptors = len(list(Path("/proc/self/fd").iterdir()))
        devices = fabric.devices.values()
        return descriptors, sum(len(d.pairs) for d in devices), sum(len(d.regions) for d in devices)

    eventually(lambda: target.counter("paths_live") == 2)
    before = open_things()
    for _ in range(1000):
        connects = path.num_connects
        path._break("a test")
        end = time.monotonic() + DEADLINE_S
        while not (path.num_connects > connects and path.is_live):
            assert time.monotonic() < end
            time.sleep(0.0005)
    eventually(lambda: open_things() == before)
    assert source.write().wait() == ALL_OK and target.read().wait() == ALL_OK
    assert target.holds(source) and target.counter("inline_keys_total") == 0


def test_a_queue_pair_that_was_connected_too_late_is_not_forgotten(
    rdma_store, fabric, source, target, monkeypatch
) -> None:
    path = target.plane.mover.paths[0]
    wait = target.plane.channel.wait
    late: list[Call] = []

    def impatient(call, deadline):
        if late or not isinstance(call.outcome, type(None)):
            return wait(call, deadline)
        late.append(call)
        return wait(call, 0.0)

    eventually(lambda: rdma_store.stats()[QUEUE_PAIRS] == 4)
    monkeypatch.setattr(target.plane.channel, "wait", impatient)
    path._break("a test")
    eventually(lambda: path.is_live and late)
    assert target.client.get("nothing") is None  # reads what answers there are
    path._break("a test")
    eventually(lambda: path.is_live and not path._unanswered)
    eventually(lambda: rdma_store.stats()[QUEUE_PAIRS] == 4)
