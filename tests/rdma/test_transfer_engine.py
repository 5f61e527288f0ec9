"""The transfer engine between two hosts, each with two soft-RoCE devices on two wires."""

import hashlib
import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvcore.transport.engine import (
    Direction,
    EngineConfig,
    Segment,
    TransferEngine,
    TransferRequest,
    TransferState,
)
from kvcore.transport.verbs import PathOptions
from tests.rdma.guest import CLIENT_HOST, SERVER_HOST, WIRES, Faults, count_rdma, python_on
from tests.rdma.plane_rig import eventually

pytestmark = pytest.mark.rdma

MIB = 1 << 20
SIZE = 16 * MIB
WAIT_MS = 100_000
# Soft-RoCE shares one CPU with everything else: what is under way at once must be little, or patience long.
PATIENT = PathOptions(timeout_exponent=17)


class Peers:
    """Engines on the server's host."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.addresses: list[str] = json.loads(self._line())

    def digests(self) -> list[str]:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        digests: list[str] = json.loads(self._line())
        return digests

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


@contextmanager
def peers(num_engines: int, size_bytes: int) -> Iterator[Peers]:
    program = Path(__file__).with_name("engine_peer.py")
    words = (SERVER_HOST.address, ",".join(SERVER_HOST.devices), str(num_engines), str(size_bytes))
    with python_on(SERVER_HOST, program, *words) as process:
        yield Peers(process)


def open_engine(**settings: object) -> TransferEngine:
    config = EngineConfig(
        host=CLIENT_HOST.address,
        device_name=",".join(CLIENT_HOST.devices),
        protocol="rdma",
        path=PATIENT,
        slice_bytes=64 << 10,
        max_requests=8,
        max_endpoints=int(str(settings.pop("max_endpoints", 16))),
        **settings,  # type: ignore[arg-type]
    )
    return TransferEngine(config)


def whole(
    engine: TransferEngine, data: np.ndarray, segment: Segment, direction: Direction
) -> TransferRequest:
    return TransferRequest(direction, data.ctypes.data, segment, segment.memories[0].address, data.nbytes)


def connect_both_wires(engine: TransferEngine, data: np.ndarray, segment: Segment) -> dict[str, int]:
    """Connections are made on demand; the first one alone might carry all of a transfer. Counters so far."""
    piece = TransferRequest(
        Direction.READ, data.ctypes.data, segment, segment.memories[0].address, data.nbytes // 16
    )

    def both() -> bool:
        batch = engine.submit_transfer([piece])
        assert engine.wait(batch, WAIT_MS)[0].state is TransferState.COMPLETED
        return min(engine.counters()[f"{name}_bytes"] for name in CLIENT_HOST.devices) > 0

    eventually(both)
    return engine.counters()


@pytest.fixture
def data() -> np.ndarray:
    return np.frombuffer(np.random.default_rng(1).bytes(SIZE), np.uint8).copy()


def test_both_wires_carry_a_transfer(data: np.ndarray) -> None:
    with peers(1, SIZE) as there, open_engine() as engine:
        engine.register_local_memory(data)
        segment = engine.open_segment(there.addresses[0])
        before = connect_both_wires(engine, data, segment)
        data[:] = np.frombuffer(np.random.default_rng(2).bytes(SIZE), np.uint8)
        batch = engine.submit_transfer([whole(engine, data, segment, Direction.WRITE)])
        assert engine.wait(batch, WAIT_MS)[0].state is TransferState.COMPLETED
        assert there.digests() == [hashlib.sha256(data).hexdigest()]
        counters = engine.counters()
        carried = [counters[f"{name}_bytes"] - before[f"{name}_bytes"] for name in CLIENT_HOST.devices]
        assert sum(carried) == SIZE
        assert min(carried) > SIZE // 10
        written = data.copy()
        data[:] = 0
        batch = engine.submit_transfer([whole(engine, data, segment, Direction.READ)])
        assert engine.wait(batch, WAIT_MS)[0].state is TransferState.COMPLETED
        assert (data == written).all()


@pytest.mark.parametrize("end", [0, 1], ids=["here", "there"])
def test_a_transfer_completes_when_a_wire_is_cut_in_the_middle(
    data: np.ndarray, faults: Faults, end: int
) -> None:
    with peers(1, SIZE) as there, open_engine() as engine:
        engine.register_local_memory(data)
        segment = engine.open_segment(there.addresses[0])
        start = connect_both_wires(engine, data, segment)
        data[:] = np.frombuffer(np.random.default_rng(2).bytes(SIZE), np.uint8)
        request = whole(engine, data, segment, Direction.WRITE)
        faults.delay(50)  # a long way, so that there is time to cut something
        batch = engine.submit_transfer([request])
        eventually(lambda: engine.counters()["rxe2_bytes"] - start["rxe2_bytes"] >= MIB)
        faults.down(WIRES[1][end])
        middle = engine.get_transfer_status(batch)[0]
        assert middle.state is TransferState.WAITING and 0 < middle.transferred_bytes < SIZE
        [status] = engine.wait(batch, WAIT_MS)
        assert status.state is TransferState.COMPLETED, status
        assert there.digests() == [hashlib.sha256(data).hexdigest()]
        counters = engine.counters()
        assert counters["failed_endpoints"] >= 1 and counters["retried_slices"] >= 1
        assert counters["rxe0_bytes"] - start["rxe0_bytes"] > counters["rxe2_bytes"] - start["rxe2_bytes"]

        # Mended, the wire is tried again after a while.
        faults.up(WIRES[1][end])
        carried = counters["rxe2_bytes"]

        def is_used_again() -> bool:
            batch = engine.submit_transfer([request])
            assert engine.wait(batch, WAIT_MS)[0].state is TransferState.COMPLETED
            return engine.counters()["rxe2_bytes"] > carried

        eventually(is_used_again, 90)


def test_without_any_wire_the_transfer_fails_in_time(data: np.ndarray, faults: Faults) -> None:
    with peers(1, SIZE) as there, open_engine() as engine:
        engine.register_local_memory(data)
        segment = engine.open_segment(there.addresses[0])
        faults.loss(100)
        batch = engine.submit_transfer([whole(engine, data, segment, Direction.READ)], timeout_ms=3_000)
        [status] = engine.wait(batch, WAIT_MS)
        assert status.state in (TransferState.FAILED, TransferState.TIMED_OUT) and status.reason


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_thousand_connections_through_a_capped_pool_leave_nothing_behind() -> None:
    num_peers, capacity = 20, 4
    before = {kind: count_rdma(kind) for kind in ("qp", "cq", "mr", "pd")}
    data = np.zeros(num_peers * 4096, np.uint8)
    with peers(num_peers, 4096) as there, open_engine(max_endpoints=capacity) as engine:
        engine.register_local_memory(data)
        segments = [engine.open_segment(address) for address in there.addresses]
        idle_pairs = count_rdma("qp")
        # One piece from each peer, in turn: each finds the pool full of others' connections.
        while engine.counters()["made_endpoints"] < 1000:
            for number, segment in enumerate(segments):
                request = TransferRequest(
                    Direction.READ,
                    data.ctypes.data + number * 4096,
                    segment,
                    segment.memories[0].address,
                    4096,
                )
                batch = engine.submit_transfer([request])
                assert engine.wait(batch, WAIT_MS)[0].state is TransferState.COMPLETED
        assert (data.reshape(num_peers, 4096) == np.arange(num_peers, dtype=np.uint8)[:, None]).all()
        counters = engine.counters()
        assert counters["failed_endpoints"] == 0
        assert counters["evicted_endpoints"] >= counters["made_endpoints"] - capacity - 2
        # Both ends of each; those that were evicted last may still be on their way out.
        assert count_rdma("qp") - idle_pairs <= 2 * (capacity + 8)
    assert {kind: count_rdma(kind) for kind in before} == before
