"""Planes against a store that is played by hand: answers that do not fit, and bytes that do."""

import mmap
import os
import socket
import threading
import time
from pathlib import Path

import pytest

from kvcore.client.connection import Connection
from kvcore.errors import StoreUnavailable
from kvcore.transport.base import ReadBatch, WriteBatch
from kvcore.transport.checksums import checksum, is_corrupt, layer_checksums
from kvcore.transport.mapping import PoolMapping, copy_from_pool, copy_to_pool
from kvcore.transport.parts import Reservation, cut
from kvcore.transport.shm import INLINE_READ_BYTES, ShmTransport
from kvcore.transport.tcp import TcpTransport
from kvcore.wire import messages as m
from kvcore.wire.messages import Status
from tests.unit.kvcore.peer import Peer

KEYS = [bytes([number]) * 32 for number in range(3)]
POOL_BYTES = 1 << 20


def tell_nobody(statuses, size_bytes) -> None:
    pass


class Bench:
    """A tcp plane on one end of a socket pair, a peer on the other."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.peer = Peer(theirs)
        self.connection = Connection(ours, lambda error: None)
        greeter = threading.Thread(target=self.peer.greet)
        greeter.start()
        self.connection.greet((m.PROTOCOL_VERSION, "test", ["tcp"]), time.monotonic() + 20)
        greeter.join()
        self.reservations: dict[bytes, Reservation] = {}
        self.tcp = TcpTransport(
            self.connection, self.reservations, timeout_s=20.0, on_read=tell_nobody, on_write=tell_nobody
        )

    def reserve(self, key: bytes, size_bytes: int, num_layers: int, extents=()) -> None:
        self.reservations[key] = Reservation(m.Grant(0, list(extents)), size_bytes, num_layers)

    def close(self) -> None:
        self.tcp.close()
        self.peer.socket.close()


@pytest.fixture
def bench():
    bench = Bench()
    yield bench
    bench.close()


class Pool:
    """A memfd and the Unix socket that hands it out, as a store would."""

    def __init__(self, folder: Path, fd_bytes: int = POOL_BYTES) -> None:
        self.path = str(folder / "attach.sock")
        self.memory_fd = os.memfd_create("pool")
        os.ftruncate(self.memory_fd, fd_bytes)
        self.memory = mmap.mmap(self.memory_fd, fd_bytes)
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(self.path)
        self.listener.listen()
        self.offer = m.ShmOffer(self.path, b"n" * 16, POOL_BYTES)
        self.nonce = b""
        self.connection: socket.socket | None = None

    def attach(self, send_fd: bool = True) -> PoolMapping:
        if self.connection is not None:
            self.connection.close()

        def hand_out() -> None:
            self.connection, _ = self.listener.accept()
            self.nonce = self.connection.recv(16)
            if send_fd:
                socket.send_fds(self.connection, [b"p"], [self.memory_fd])
            else:
                self.connection.shutdown(socket.SHUT_RDWR)

        thread = threading.Thread(target=hand_out)
        thread.start()
        try:
            return PoolMapping.attach(self.offer, 20.0)
        finally:
            thread.join()

    def close(self) -> None:
        self.memory.close()
        os.close(self.memory_fd)
        self.listener.close()
        if self.connection is not None:
            self.connection.close()


@pytest.fixture
def pool(tmp_path):
    pool = Pool(tmp_path)
    yield pool
    pool.close()


def test_runs_respect_both_limits():
    assert [list(run) for run in cut([5, 5, 5, 20, 1, 1], 10, 100)] == [[0, 1], [2], [3], [4, 5]]
    assert [list(run) for run in cut([1] * 5, 100, 2)] == [[0, 1], [2, 3], [4]]
    assert list(cut([], 10, 10)) == []


def test_checksums_do_not_depend_on_how_bytes_lie():
    data = os.urandom(3000)
    pieces = [memoryview(data)[:7], memoryview(data)[7:1500], memoryview(data)[1500:]]
    assert checksum(pieces) == checksum([memoryview(data)])
    assert layer_checksums(pieces, 3) == [
        checksum([memoryview(data[at : at + 1000])]) for at in (0, 1000, 2000)
    ]
    good = layer_checksums(pieces, 3)
    assert not is_corrupt(pieces, good) and not is_corrupt(pieces, [0, good[1], 0])
    assert not is_corrupt(pieces, [0, 0, 0]) and is_corrupt(pieces, [good[0], good[1] ^ 1, good[2]])


@pytest.mark.parametrize(
    ("reply", "payload"),
    [
        (m.ReadReply(0, b"\0", [10]), bytes(10)),
        (m.ReadReply(0, b"\0\0", [10]), bytes(10)),
        (m.ReadReply(0, b"\0\0", [10, 10]), bytes(19)),
    ],
)
def test_a_reply_that_does_not_fit_ends_the_connection(bench, reply, payload):
    buffers = [bytearray(10), bytearray(10)]
    read = bench.tcp.submit(ReadBatch(keys=KEYS[:2], buffers=buffers, layer_end=1))
    request, _ = bench.peer.expect()
    fields = [getattr(reply, name) for name in reply.__struct_fields__[1:]]
    bench.peer.reply(m.ReadReply(request.id, *fields), payload)
    assert read.wait() == [Status.UNAVAILABLE] * 2 and bench.connection.broken


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (lambda id: m.ErrorReply(id, m.ErrorCode.NOT_READY, "soon", True), Status.UNAVAILABLE),
        (lambda id: m.ErrorReply(id, m.ErrorCode.OVER_LIMIT, "too much"), Status.INVALID),
        (lambda id: m.ReadReply(id, b"\xc8", [0]), Status.INVALID),
    ],
)
def test_answers_other_than_bytes(bench, answer, expected):
    read = bench.tcp.submit(ReadBatch(keys=KEYS[:1], buffers=[bytearray(5)]))
    bench.peer.reply(answer(bench.peer.expect()[0].id))
    assert read.wait() == [expected] and not bench.connection.broken


def test_checksums_follow_the_keys_that_are_there(bench):
    values = [os.urandom(6), os.urandom(8)]
    sums = [*layer_checksums([memoryview(values[0])], 3), checksum([memoryview(values[1][:4])]), 4711]
    buffers = [bytearray(6), bytearray(9), bytearray(8)]
    read = bench.tcp.submit(ReadBatch(keys=KEYS, buffers=buffers))
    request, _ = bench.peer.expect()
    statuses = bytes([Status.OK, Status.MISSING, Status.OK])
    reply = m.ReadReply(request.id, statuses, [6, 0, 8], sums, [3, 0, 2])
    bench.peer.reply(reply, b"".join(values))
    assert read.wait() == [Status.OK, Status.MISSING, Status.CORRUPT]
    assert buffers[0] == values[0]
    removed, _ = bench.peer.expect()
    assert isinstance(removed, m.Remove) and removed.keys == [KEYS[2]]


def test_writes_that_cannot_be_right_never_leave_this_process(bench):
    bench.reserve(KEYS[0], 100, 2)
    batch = WriteBatch(keys=KEYS[:2], buffers=[bytes(49), bytes(50)], layer_begin=0, layer_end=1)
    assert bench.tcp.submit(batch).wait() == [Status.INVALID, Status.ABANDONED]
    late = WriteBatch(keys=KEYS[:1], buffers=[bytes(50)], layer_begin=1, layer_end=2)
    assert bench.tcp.submit(late).wait() == [Status.INVALID]
    good = WriteBatch(keys=KEYS[:1], buffers=[bytes(100)], layer_begin=0, layer_end=2)
    write = bench.tcp.submit(good)
    request, payload = bench.peer.expect()
    assert isinstance(request, m.Write) and len(payload) == 100 and len(request.checksums) == 2
    bench.peer.reply(m.StatusReply(request.id, b"\0"))
    assert write.wait() == [Status.OK] and bench.reservations == {}


def test_the_pool_is_shared_and_its_socket_outlives_the_mapping(pool):
    mapping = pool.attach()
    assert pool.nonce == b"n" * 16 and mapping.size_bytes == POOL_BYTES
    with mapping.using() as memory:
        copy_to_pool(memory, [(100, 3), (500, 200_000)], [memoryview(b"abcde"), memoryview(bytes(199_998))])
        assert pool.memory[100:103] == b"abc" and pool.memory[500:502] == b"de"
        target = bytearray(5)
        copy_from_pool(memory, [(100, 3), (500, 2)], [memoryview(target)[:1], memoryview(target)[1:]])
        assert target == b"abcde"
        mapping.close()
        pool.connection.setblocking(False)
        with pytest.raises(BlockingIOError):
            pool.connection.recv(1)
        memory[0] = 7
    assert pool.memory[0] == 7 and pool.connection.recv(1) == b""
    with mapping.using() as memory:
        assert memory is None
    mapping.close()


def test_a_piece_held_by_somebody_keeps_the_store_from_believing_us_gone(pool):
    mapping = pool.attach()
    with mapping.using() as memory:
        held = memory[10:20]
    mapping.close()
    pool.connection.setblocking(False)
    with pytest.raises(BlockingIOError):
        pool.connection.recv(1)
    held.release()
    mapping.abandon_after_fork()
    assert pool.connection.recv(1) == b""


def test_a_pool_that_cannot_be_had(tmp_path, pool):
    with pytest.raises(StoreUnavailable, match="did not hand over"):
        pool.attach(send_fd=False)
    with pytest.raises(StoreUnavailable, match="cannot be mapped"):
        PoolMapping.attach(m.ShmOffer(str(tmp_path / "absent.sock"), b"n" * 16, 5), 1.0)
    pool.offer = m.ShmOffer(pool.path, b"n" * 16, 2 * POOL_BYTES)
    with pytest.raises(StoreUnavailable, match="offered"):
        pool.attach()


@pytest.fixture
def shm(bench, pool):
    plane = ShmTransport(bench.tcp, pool.attach(), lease_ms=5000)
    yield plane
    plane.close()


SIZE = INLINE_READ_BYTES + 1024


@pytest.mark.parametrize(
    "grant",
    [
        m.Grant(0, [POOL_BYTES - 10, SIZE], SIZE, 1, 1),
        m.Grant(0, [-5, SIZE], SIZE, 1, 1),
        m.Grant(0, [0, SIZE - 1], SIZE, 1, 1),
        m.Grant(0, [0], SIZE, 1, 1),
        m.Grant(0, [], SIZE, 1, 1),
    ],
)
def test_grants_that_reach_out_of_the_pool_are_refused(bench, shm, grant):
    read = shm.submit(ReadBatch(keys=KEYS[:1], buffers=[bytearray(SIZE)], layer_end=1))
    request, _ = bench.peer.expect()
    assert isinstance(request, m.Acquire)
    bench.peer.reply(m.AcquireReply(request.id, 9, [grant]))
    assert read.wait() == [Status.INVALID]
    released, _ = bench.peer.expect()
    assert isinstance(released, m.Release) and released.lease == 9
    bench.reserve(KEYS[1], SIZE, 1, grant.extents)
    write = WriteBatch(keys=[KEYS[1]], buffers=[bytes(SIZE)], layer_begin=0, layer_end=1)
    assert shm.submit(write).wait() == [Status.UNAVAILABLE]


def test_a_lease_over_little_ends_with_the_next_acquire_and_one_over_much_at_once(
    bench, shm, pool, monkeypatch
):
    grant = m.Grant(0, [0, SIZE], SIZE, 1, 1)
    for lease, expected in ((9, []), (10, [9])):
        read = shm.submit(ReadBatch(keys=KEYS[:1], buffers=[bytearray(SIZE)], layer_end=1))
        request, _ = bench.peer.expect()
        assert isinstance(request, m.Acquire) and request.release == expected
        bench.peer.reply(m.AcquireReply(request.id, lease, [grant]))
        assert read.wait() == [Status.OK]
    monkeypatch.setattr("kvcore.transport.ended_leases.MAX_LINGERING_BYTES", SIZE - 1)
    read = shm.submit(ReadBatch(keys=KEYS[:1], buffers=[bytearray(SIZE)], layer_end=1))
    request, _ = bench.peer.expect()
    assert isinstance(request, m.Acquire) and request.release == [10]
    bench.peer.reply(m.AcquireReply(request.id, 11, [grant]))
    assert read.wait() == [Status.OK]
    released, _ = bench.peer.expect()
    assert isinstance(released, m.Release) and released.lease == 11


def test_bytes_copied_while_the_store_hung_up_are_a_miss(bench, shm, pool):
    pool.memory[:SIZE] = os.urandom(SIZE)
    buffer = bytearray(SIZE)

    def sink(index: int, size_bytes: int) -> list[memoryview]:
        bench.peer.socket.shutdown(socket.SHUT_RDWR)
        return [memoryview(buffer)]

    read = shm.submit_read(KEYS[:1], [SIZE], sink)
    request, _ = bench.peer.expect()
    bench.peer.reply(m.AcquireReply(request.id, 9, [m.Grant(0, [0, SIZE], SIZE, 1, 1)]))
    assert read.wait() == [Status.UNAVAILABLE]


def test_small_reads_go_inline(bench, shm):
    read = shm.submit(ReadBatch(keys=KEYS[:1], buffers=[bytearray(5)]))
    request, _ = bench.peer.expect()
    assert isinstance(request, m.Read)
    bench.peer.reply(m.ReadReply(request.id, b"\0", [5]), b"12345")
    assert read.wait() == [Status.OK]
