"""A client vanishes and its card goes on writing: nothing of it reaches what the store puts there next."""

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvcore.layout import extent_spans
from kvcore.transport.verbs import Opcode, Operation, PathOptions, load_binding, wait_for_event
from kvcore.wire.messages import ConnectQueuePair, ConnectQueuePairReply, Reserve, Status
from tests.integration.store_harness import RawClient
from tests.integration.store_process import StoreProcess
from tests.rdma.guest import CLIENT_HOST, count_rdma
from tests.rdma.plane_rig import eventually, opener, store_on_server

pytestmark = pytest.mark.rdma

MIB = 1 << 20
NUM_KEYS = 8


class LateWriter:
    """Speaks the protocol by hand and never stops writing to what it was once granted."""

    def __init__(self, store: StoreProcess) -> None:
        self.control = RawClient(socket.create_connection((store.host, store.port), 60))
        offer = self.control.hello(planes=["rdma"]).rdma
        self.device = load_binding().open(CLIENT_HOST.devices[0])
        self.memory = np.full(MIB, 0xEE, np.uint8)
        self.region = self.device.register(self.memory.ctypes.data, MIB, remote=False)
        self.queue = self.device.completion_queue(64)
        self.pair = self.device.queue_pair(self.queue, max_requests=32)
        reply, _ = self.control.ask(ConnectQueuePair, device=offer.devices[0], address=self.pair.address)
        assert isinstance(reply, ConnectQueuePairReply), reply
        # Patient, or on a busy machine it gives up before its time.
        self.pair.connect(reply.address, PathOptions(timeout_exponent=16, retries=3))
        self._pool = reply
        self.rounds = 0
        self.status = 0
        self._thread = threading.Thread(target=self._write)

    def reserve(self) -> None:
        keys = [f"late{number}".encode() for number in range(NUM_KEYS)]
        reply, _ = self.control.ask(Reserve, keys=keys, sizes_bytes=[MIB])
        assert [grant.status for grant in reply.grants] == [Status.OK] * NUM_KEYS
        self._operations = [
            Operation(self.memory.ctypes.data, size, self.region.local_key, self._pool.pool_address + offset)
            for grant in reply.grants
            for offset, size in extent_spans(grant.extents, 0, MIB)
        ]

    def start(self) -> None:
        self._thread.start()
        eventually(lambda: self.rounds > 2)

    def vanish(self) -> None:
        """Only the control connection goes; the card knows nothing of it."""
        self.control.close()

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()
        self.pair.close()
        self.queue.close()
        self.region.close()
        self.device.close()

    def _write(self) -> None:
        chain = self.pair.chain(NUM_KEYS)
        while not self.status:
            chain.fill(Opcode.WRITE, self._pool.remote_key, self._operations, self.rounds)
            self.pair.post(chain)
            self.queue.arm()
            while not (found := self.queue.poll()):
                wait_for_event(self.queue, 1.0)
                self.queue.arm()
            self.status = found[0].status
            self.rounds += 1
        chain.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreProcess]:
    with store_on_server(tmp_path, pool="12mb") as store:
        yield store


def test_extents_are_used_again_only_when_nobody_can_write_to_them(
    store: StoreProcess,
) -> None:
    pairs_before = count_rdma("qp")
    late = LateWriter(store)
    late.reserve()
    assert count_rdma("qp") == pairs_before + 2
    late.start()
    with opener(store, planes=("tcp",)) as open_client:
        client = open_client()
        assert not late.status, "it still writes"
        late.vanish()
        # As soon as there is room again it is used for something else, and looked at meanwhile.
        keys = [f"next{number}" for number in range(NUM_KEYS)]
        values = [np.full(MIB, number, np.uint8).tobytes() for number in range(NUM_KEYS)]
        written: set[int] = set()
        end = time.monotonic() + 60
        while len(written) < NUM_KEYS or not late.status:
            assert time.monotonic() < end, (len(written), late.status)
            for number in set(range(NUM_KEYS)) - written:
                if client.put(keys[number], values[number]) is Status.OK:
                    written.add(number)
            for number in written:
                assert client.get(keys[number]) == values[number]
        late.join()
        assert late.status == 12  # nobody answers: its queue pair was destroyed first
        assert [client.get(key) for key in keys] == values
    assert count_rdma("qp") == pairs_before
