"""The transfer engine over devices and wires that are Python objects (verbs_fake), and over TCP."""

import socket
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvcore.errors import ConfigError, LocalProtocolError, RequestRefused, StoreUnavailable
from kvcore.transport.engine import (
    Direction,
    EngineConfig,
    Segment,
    TransferEngine,
    TransferRequest,
    TransferState,
    TransferStatus,
)
from kvcore.transport.engine.memory import LocalMemory
from kvcore.transport.slices import RetryPolicy
from kvcore.transport.topology import Cards
from kvcore.transport.verbs import Completion, RdmaUnavailable
from kvcore.transport.verbs_fake import FakeFabric

KIB = 1 << 10
SIZE = 256 * KIB
SLICE = 4 * KIB
WAIT_MS = 60_000


class Node:
    """An engine with one piece of memory."""

    def __init__(self, engine: TransferEngine, seed: int, size_bytes: int = SIZE) -> None:
        self.engine = engine
        self.bytes = np.frombuffer(np.random.default_rng(seed).bytes(size_bytes), np.uint8).copy()
        self.memory: LocalMemory = engine.register_local_memory(self.bytes)

    def request(
        self, direction: Direction, segment: Segment, size_bytes: int = SIZE, offset: int = 0, target: int = 0
    ) -> TransferRequest:
        peer = segment.memories[0].address + target
        return TransferRequest(direction, self.memory.address + offset, segment, peer, size_bytes)

    def run(self, *requests: TransferRequest, timeout_ms: float | None = None) -> list[TransferStatus]:
        batch = self.engine.submit_transfer(requests, timeout_ms=timeout_ms)
        return self.engine.wait(batch, WAIT_MS)


Make = Callable[..., Node]


@pytest.fixture
def fabric() -> FakeFabric:
    return FakeFabric("a0", "a1", "b0", "b1")


@pytest.fixture
def make(fabric: FakeFabric) -> Iterator[Make]:
    """make("a0,a1", **settings) -> a node with these devices; "" goes over TCP."""
    engines: list[TransferEngine] = []

    def make_node(devices: str, size_bytes: int = SIZE, **settings: object) -> Node:
        protocol = {} if "protocol" in settings else {"protocol": "rdma" if devices else "tcp"}
        values = {"slice_bytes": SLICE, "max_requests": 16, **protocol, **settings}
        config = EngineConfig(device_name=devices, **values)  # type: ignore[arg-type]
        engine = TransferEngine(config, binding=fabric)
        engines.append(engine)
        return Node(engine, len(engines), size_bytes)

    yield make_node
    for engine in engines:
        engine.close()
    assert all(not device.pairs for device in fabric.devices.values())
    assert all(not device.regions for device in fabric.devices.values())


@pytest.fixture(params=["rdma", "tcp"])
def pair(request: pytest.FixtureRequest, make: Make) -> tuple[Node, Node]:
    names = ("a0,a1", "b0,b1") if request.param == "rdma" else ("", "")
    return make(names[0]), make(names[1])


def segment_of(node: Node, peer: Node) -> Segment:
    return node.engine.open_segment(peer.engine.address)


def test_what_is_written_is_there(pair: tuple[Node, Node]) -> None:
    one, other = pair
    before = other.bytes.copy()
    request = one.request(Direction.WRITE, segment_of(one, other), size_bytes=100_001, offset=3, target=17)
    assert one.run(request) == [TransferStatus(TransferState.COMPLETED, 100_001)]
    assert (other.bytes[17 : 17 + 100_001] == one.bytes[3 : 3 + 100_001]).all()
    assert (other.bytes[:17] == before[:17]).all()
    assert (other.bytes[17 + 100_001 :] == before[17 + 100_001 :]).all()


def test_what_is_read_is_here(pair: tuple[Node, Node]) -> None:
    one, other = pair
    assert one.run(one.request(Direction.READ, segment_of(one, other)))[0].state is TransferState.COMPLETED
    assert (one.bytes == other.bytes).all()


def test_a_batch_of_many_small_requests(pair: tuple[Node, Node]) -> None:
    one, other = pair
    segment = segment_of(one, other)
    order = np.random.default_rng(0).permutation(256)
    before = one.bytes.copy()
    requests = [
        one.request(Direction.WRITE, segment, KIB, offset=index * KIB, target=int(place) * KIB)
        for index, place in enumerate(order)
    ]
    assert {status.state for status in one.run(*requests)} == {TransferState.COMPLETED}
    assert (other.bytes.reshape(256, KIB)[order] == before.reshape(256, KIB)).all()


def test_threads_share_an_engine(pair: tuple[Node, Node]) -> None:
    one, other = pair
    segment = segment_of(one, other)
    results: list[TransferState] = []

    def work(number: int) -> None:
        span = SIZE // 8
        for _ in range(5):
            request = one.request(Direction.WRITE, segment, span, offset=number * span, target=number * span)
            results.extend(status.state for status in one.run(request))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_MS / 1e3)
    assert results == [TransferState.COMPLETED] * 40 and (one.bytes == other.bytes).all()


def test_an_empty_batch_is_done(pair: tuple[Node, Node]) -> None:
    assert pair[0].run() == []


def test_senseless_requests_move_nothing(pair: tuple[Node, Node]) -> None:
    one, other = pair
    segment = segment_of(one, other)
    good = one.request(Direction.WRITE, segment)
    for bad in (
        good._replace(size_bytes=0),
        good._replace(size_bytes=SIZE + 1),
        good._replace(source=good.source + 1),
        good._replace(target=good.target - 1),
    ):
        with pytest.raises(ValueError):
            one.engine.submit_transfer([good, bad])
    one.engine.unregister_local_memory(one.memory)
    assert not (one.bytes == other.bytes).all()


def test_memory_is_registered_once_and_must_be_writable(pair: tuple[Node, Node]) -> None:
    engine, memory = pair[0].engine, pair[0].memory
    with pytest.raises(ConfigError, match="registered already"):
        engine.register_local_memory(pair[0].bytes[100:200])
    with pytest.raises(ConfigError, match="writable"):
        engine.register_local_memory(b"constant")
    with pytest.raises(ConfigError, match="no bytes"):
        engine.register_local_memory(bytearray())
    engine.unregister_local_memory(memory)
    with pytest.raises(LocalProtocolError, match="begins at"):
        engine.unregister_local_memory(memory)
    assert engine.register_local_memory(pair[0].bytes[100:200]).size_bytes == 100


def test_memory_that_the_peer_took_back_is_not_touched(pair: tuple[Node, Node]) -> None:
    one, other = pair
    segment = segment_of(one, other)
    other.engine.unregister_local_memory(other.memory)
    before = other.bytes.copy()
    [status] = one.run(one.request(Direction.WRITE, segment))
    assert status.state is TransferState.FAILED and status.transferred_bytes == 0
    assert "refused" in status.reason or "not registered" in status.reason
    assert (other.bytes == before).all()
    with pytest.raises(ValueError, match="open_segment again"):
        one.run(one.request(Direction.WRITE, segment)._replace(segment=segment_of(one, other)))


def test_a_peer_that_is_gone_fails_what_is_sent_to_it(pair: tuple[Node, Node]) -> None:
    one, other = pair
    segment = segment_of(one, other)
    assert one.run(one.request(Direction.WRITE, segment))[0].state is TransferState.COMPLETED
    other.engine.close()
    [status] = one.run(one.request(Direction.WRITE, segment))
    assert status.state is TransferState.FAILED and status.reason
    with pytest.raises(StoreUnavailable):
        one.engine.open_segment(other.engine.address)


def test_a_closed_engine_says_so(pair: tuple[Node, Node]) -> None:
    one, other = pair
    request = one.request(Direction.WRITE, segment_of(one, other))
    one.engine.close()
    one.engine.close()
    for call in (
        lambda: one.engine.submit_transfer([request]),
        lambda: one.engine.open_segment(other.engine.address),
        lambda: one.engine.register_local_memory(bytearray(1)),
    ):
        with pytest.raises(LocalProtocolError, match="closed"):
            call()


# ---- what only cards do


def test_a_transfer_is_striped_over_all_cards(make: Make) -> None:
    one, other = make("a0,a1"), make("b0,b1")
    request = one.request(Direction.WRITE, segment_of(one, other))
    while one.engine.counters()["made_endpoints"] < 2:
        one.run(request)
    before = one.engine.counters()
    assert one.run(request)[0].state is TransferState.COMPLETED
    counters = one.engine.counters()
    moved = [counters[name] - before[name] for name in ("a0_bytes", "a1_bytes")]
    assert sum(moved) == SIZE and min(moved) >= SIZE // 4
    assert counters["made_endpoints"] == 2 and counters["failed_endpoints"] == 0


def test_a_cable_that_is_pulled_in_the_middle(make: Make, fabric: FakeFabric) -> None:
    one, other = make("a0,a1"), make("b0,b1")
    segment = segment_of(one, other)
    fabric.hold()
    batch = one.engine.submit_transfer([one.request(Direction.WRITE, segment)])
    assert one.engine.wait(batch, 200)[0].state is TransferState.WAITING
    fabric.devices["b1"].active = False
    fabric.deliver()
    assert one.engine.wait(batch, WAIT_MS)[0].state is TransferState.COMPLETED
    assert (one.bytes == other.bytes).all()
    counters = one.engine.counters()
    assert counters["failed_endpoints"] >= 1 and counters["retried_slices"] >= 1
    assert counters["a0_bytes"] > counters["a1_bytes"]


def test_a_card_that_came_back_is_used_again(make: Make, fabric: FakeFabric) -> None:
    one = make("a0,a1", retry=RetryPolicy(avoid_s=0.05, max_avoid_s=0.05))
    other = make("b0,b1")
    segment = segment_of(one, other)
    fabric.devices["a1"].active = False
    assert one.run(one.request(Direction.WRITE, segment))[0].state is TransferState.COMPLETED
    assert one.engine.counters()["a1_bytes"] == 0
    fabric.devices["a1"].active = True
    for _ in range(200):
        assert one.run(one.request(Direction.READ, segment))[0].state is TransferState.COMPLETED
        if one.engine.counters()["a1_bytes"]:
            return
        threading.Event().wait(0.05)
    raise AssertionError("the card was never tried again")


def test_a_card_that_breaks_leaves_its_work_to_the_other(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = make("a0,a1"), make("b0,b1")
    segment = segment_of(one, other)

    def broken(max_completions: int = 64) -> list[Completion]:
        raise RdmaUnavailable("the completion queue is broken")

    monkeypatch.setattr(one.engine._cards["a1"].completions, "poll", broken)
    for _ in range(3):
        assert one.run(one.request(Direction.WRITE, segment))[0].state is TransferState.COMPLETED
    assert (one.bytes == other.bytes).all() and one.engine.counters()["a1_bytes"] == 0


def test_a_bug_in_the_worker_fails_transfers_and_hangs_nobody(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = make("a0"), make("b0")
    request = one.request(Direction.WRITE, segment_of(one, other))

    def wrong(*arguments: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(one.engine._worker, "_assign", wrong)
    for _ in range(2):
        assert one.run(request)[0] == TransferStatus(TransferState.FAILED, 0, "the engine is closed")
    assert "boom" in caplog.text


def test_without_a_way_the_request_fails_with_the_reason(make: Make, fabric: FakeFabric) -> None:
    one, other = make("a0,a1", retry=RetryPolicy(max_attempts=3)), make("b0,b1")
    segment = segment_of(one, other)
    for name in ("b0", "b1"):
        fabric.devices[name].active = False
    [status] = one.run(one.request(Direction.WRITE, segment))
    assert status == TransferStatus(TransferState.FAILED, 0, "the peer does not answer")
    one.engine.unregister_local_memory(one.memory)


def test_tcp_is_the_last_way(make: Make, fabric: FakeFabric) -> None:
    one, other = make("a0,a1", protocol="auto"), make("b0,b1", protocol="auto")
    segment = segment_of(one, other)
    for device in fabric.devices.values():
        device.active = False
    assert one.run(one.request(Direction.WRITE, segment))[0].state is TransferState.COMPLETED
    assert (one.bytes == other.bytes).all() and one.engine.counters()["a0_bytes"] == 0


def test_a_transfer_that_takes_too_long_ends_and_touches_nothing_any_more(
    make: Make, fabric: FakeFabric
) -> None:
    one, other = make("a0"), make("b0")
    segment = segment_of(one, other)
    assert one.run(one.request(Direction.READ, segment))[0].state is TransferState.COMPLETED
    other.bytes[:] = 0
    fabric.hold()
    late = one.engine.submit_transfer([one.request(Direction.WRITE, segment, SIZE // 2)], timeout_ms=100)
    patient = one.engine.submit_transfer(
        [one.request(Direction.WRITE, segment, SIZE // 2, offset=SIZE // 2, target=SIZE // 2)]
    )
    [status] = one.engine.wait(late, WAIT_MS)
    assert status.state is TransferState.TIMED_OUT and status.transferred_bytes == 0
    one.bytes[: SIZE // 2] = 255
    fabric.deliver()
    assert one.engine.wait(patient, WAIT_MS)[0].state is TransferState.COMPLETED
    assert (other.bytes[: SIZE // 2] == 0).all()
    assert (other.bytes[SIZE // 2 :] == one.bytes[SIZE // 2 :]).all()


def test_memory_in_use_stays_registered(make: Make, fabric: FakeFabric) -> None:
    one, other = make("a0"), make("b0")
    segment = segment_of(one, other)
    fabric.hold()
    batch = one.engine.submit_transfer([one.request(Direction.WRITE, segment)])
    with pytest.raises(LocalProtocolError, match="1 transfers"):
        one.engine.unregister_local_memory(one.memory)
    threading.Event().wait(0.1)
    fabric.deliver()
    assert one.engine.wait(batch, WAIT_MS)[0].state is TransferState.COMPLETED
    one.engine.unregister_local_memory(one.memory)


def test_closing_fails_what_is_under_way(make: Make, fabric: FakeFabric) -> None:
    one, other = make("a0"), make("b0")
    fabric.hold()
    batch = one.engine.submit_transfer([one.request(Direction.WRITE, segment_of(one, other))])
    one.engine.close()
    [status] = one.engine.wait(batch, WAIT_MS)
    assert status == TransferStatus(TransferState.FAILED, 0, "the engine is closed")
    before = other.bytes.copy()
    fabric.deliver()
    assert (other.bytes == before).all()


def test_connections_are_capped(make: Make, fabric: FakeFabric) -> None:
    one = make("a0,a1", max_endpoints=2)
    peers = [make("b0,b1", size_bytes=SLICE) for _ in range(5)]
    segments = [segment_of(one, peer) for peer in peers]
    for _ in range(3):
        requests = [one.request(Direction.READ, segment, SLICE) for segment in segments]
        assert {status.state for status in one.run(*requests)} == {TransferState.COMPLETED}
        assert sum(len(fabric.devices[name].pairs) for name in ("a0", "a1")) <= 2
    assert one.engine.counters()["evicted_endpoints"] >= 10


def test_a_card_that_refuses_memory_fails_the_registration(make: Make, fabric: FakeFabric) -> None:
    one = make("a0,a1")
    fabric.devices["a1"].is_full = True
    with pytest.raises(RdmaUnavailable):
        one.engine.register_local_memory(bytearray(100))
    assert len(fabric.devices["a0"].regions) == 1
    fabric.devices["a1"].is_full = False
    one.engine.register_local_memory(bytearray(100))


def test_a_matrix_decides_about_the_cards(make: Make, tmp_path: object) -> None:
    one, other = make("a0,a1"), make("b0,b1")
    segment = segment_of(one, other)
    assert segment.matrix and {*next(iter(segment.matrix.values())).preferred} == {"b0", "b1"}
    one.engine._matrix = {"cpu:0": Cards(("a1",), ("a0",))}
    one.memory.place = "cpu:0"
    assert one.run(one.request(Direction.WRITE, segment))[0].state is TransferState.COMPLETED
    assert one.engine.counters()["a0_bytes"] == 0


# ---- strangers


def test_a_token_keeps_strangers_out(make: Make) -> None:
    one, friend, other = make("", token="secret"), make("", token="secret"), make("", token="guess")
    assert friend.engine.open_segment(one.engine.address).memories
    with pytest.raises(RequestRefused, match="token"):
        other.engine.open_segment(one.engine.address)


def test_noise_closes_one_connection_and_nothing_else(make: Make) -> None:
    one, other = make(""), make("")
    host, port = one.engine.address.split(":")
    for noise in (b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 64, b"\x01\x00\x00\x00" + bytes(8) + b"\xc1"):
        with socket.create_connection((host, int(port)), 10) as sock:
            sock.sendall(noise)
            assert sock.recv(100) == b""
    assert other.engine.open_segment(one.engine.address).memories
