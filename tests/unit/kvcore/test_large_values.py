"""What is hashed while it moves: large values in and out, and the sums that go with them."""

import os
import struct
import subprocess
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.layout import split_views
from kvcore.transport.base import ReadBatch
from kvcore.transport.checksums import (
    LARGE_READ_BYTES,
    PIECE_BYTES,
    LateSums,
    RunningSums,
    checksum,
    layer_checksums,
)
from kvcore.transport.mapping import copy_to_pool
from kvcore.wire import messages as m
from kvcore.wire.messages import Status
from tests.unit.kvcore.test_planes import KEYS, Bench

DEADLINE_S = 60.0
SIZES = [3 * PIECE_BYTES + 7, PIECE_BYTES // 2, PIECE_BYTES + 1]


@pytest.fixture
def bench():
    bench = Bench()
    yield bench
    bench.close()


@pytest.fixture
def values():
    return [os.urandom(size) for size in SIZES]


@given(
    layers=st.lists(st.lists(st.binary(max_size=9), min_size=1).filter(any), min_size=1, max_size=6),
    steps=st.lists(st.integers(1, 7), min_size=1),
)
def test_sums_do_not_depend_on_how_the_bytes_came(layers, steps):
    views = [[memoryview(piece) for piece in layer] for layer in layers]
    running = RunningSums(views)
    left_bytes, turn = sum(len(piece) for layer in layers for piece in layer), 0
    while left_bytes:
        step_bytes = min(steps[turn % len(steps)], left_bytes)
        running.add(step_bytes)
        left_bytes -= step_bytes
        turn += 1
    assert running.sums == [checksum([memoryview(b"".join(layer))]) for layer in layers]


def answer_read(bench, values, sums, num_layers):
    """Plays the store for one Read; the payload does not fit a socket, so it needs a thread."""
    request, _ = bench.peer.expect()
    assert isinstance(request, m.Read)
    reply = m.ReadReply(request.id, bytes(len(values)), list(map(len, values)), sums, num_layers)
    sender = threading.Thread(target=bench.peer.reply, args=(reply, b"".join(values)))
    sender.start()
    return sender


@pytest.mark.parametrize("spoiled", [None, 0, 1, 2])
def test_a_large_batch_is_verified_key_by_key(bench, values, spoiled):
    sums = [checksum([memoryview(value)]) for value in values]
    if spoiled is not None:
        sums[spoiled] ^= 1
    buffers = [bytearray(SIZES[0]), bytearray(SIZES[1]), [bytearray(5), bytearray(SIZES[2] - 5)]]
    read = bench.tcp.submit(ReadBatch(keys=KEYS, buffers=buffers))
    sender = answer_read(bench, values, sums, [1, 1, 1])
    assert read.wait() == [Status.CORRUPT if index == spoiled else Status.OK for index in range(3)]
    sender.join()
    assert buffers[:2] == values[:2] and b"".join(buffers[2]) == values[2]
    if spoiled is not None:
        removed, _ = bench.peer.expect()
        assert isinstance(removed, m.Remove) and removed.keys == [KEYS[spoiled]]


def test_what_finds_no_room_does_not_put_the_sums_of_others_out_of_step(bench, values):
    sums = [checksum([memoryview(value)]) for value in values]
    buffers = [bytearray(1), bytearray(SIZES[1]), bytearray(SIZES[2])]
    read = bench.tcp.submit(ReadBatch(keys=KEYS, buffers=buffers))
    sender = answer_read(bench, values, sums, [1, 1, 1])
    assert read.wait() == [Status.INVALID, Status.OK, Status.OK]
    sender.join()
    assert buffers[1:] == values[1:]


@pytest.mark.parametrize("size_bytes", [100, LARGE_READ_BYTES + PIECE_BYTES])
@pytest.mark.parametrize("spoiled", [False, True])
@pytest.mark.parametrize("num_layers", [1, 4])
def test_one_key_in_layers_is_verified(bench, size_bytes, spoiled, num_layers):
    value, buffer = os.urandom(size_bytes), bytearray(size_bytes)
    sums = layer_checksums([memoryview(value)], num_layers)
    sums[-1] ^= spoiled
    statuses: list[Status] = []
    reader = threading.Thread(
        target=lambda: statuses.append(
            bench.tcp.read_one(KEYS[0], size_bytes, lambda index, size: [memoryview(buffer)])
        )
    )
    reader.start()
    answer_read(bench, [value], sums, [num_layers]).join()
    reader.join()
    assert statuses == [Status.CORRUPT if spoiled else Status.OK] and buffer == value
    if spoiled:
        removed, _ = bench.peer.expect()
        assert isinstance(removed, m.Remove) and removed.keys == KEYS[:1]


@pytest.mark.parametrize("reply", [m.ReadReply(0, b"\0\0", [5]), m.ReadReply(0, b"\0", [4, 1])])
def test_an_answer_for_other_keys_than_the_one_ends_the_connection(bench, reply):
    statuses: list[Status] = []
    reader = threading.Thread(
        target=lambda: statuses.append(bench.tcp.read_one(KEYS[0], 5, lambda index, size: None))
    )
    reader.start()
    request, _ = bench.peer.expect()
    bench.peer.reply(m.ReadReply(request.id, reply.statuses, reply.sizes_bytes), bytes(5))
    reader.join()
    assert statuses == [Status.UNAVAILABLE] and bench.connection.broken


def test_sums_of_a_large_put_follow_its_values(bench, values):
    views = [split_views([memoryview(value)], [7, len(value) - 7])[0:2] for value in values]
    pieces = [[piece for run in runs for piece in run] for runs in views]
    received: list[tuple[m.Message, bytes]] = []

    def play() -> None:
        received.append(bench.peer.expect())
        bench.peer.reply(m.StatusReply(received[0][0].id, bytes(3)))

    peer = threading.Thread(target=play)
    peer.start()
    assert bench.tcp.submit_put(KEYS, pieces).wait() == [Status.OK] * 3
    peer.join()
    put, payload = received[0]
    assert isinstance(put, m.Put) and put.sums_follow and not put.checksums
    assert payload[:-24] == b"".join(values)
    assert struct.unpack("<3Q", payload[-24:]) == tuple(checksum([memoryview(value)]) for value in values)


def test_late_sums_read_nothing_after_their_end(values, monkeypatch):
    hashed, has_begun, go_on = [], threading.Event(), threading.Event()

    def slow_checksum(views):
        has_begun.set()
        go_on.wait(DEADLINE_S)
        hashed.append(sum(map(len, views)))
        return 1

    monkeypatch.setattr("kvcore.transport.checksums.checksum", slow_checksum)
    first, second = (LateSums([[memoryview(value)] for value in values]) for _ in range(2))
    first.begin()
    assert has_begun.wait(DEADLINE_S)
    second.begin()
    second.end()  # it has not begun: the one thread is busy with the first
    assert not hashed
    threading.Timer(0.05, go_on.set).start()
    first.end()
    assert hashed == [len(value) for value in values]


def test_late_sums_work_in_a_forked_process():
    script = """
import os
from kvcore.transport.checksums import LateSums
def compute():
    sums = LateSums([[memoryview(b"x")]])
    sums.begin()
    packed = sums.packed()
    sums.end()
    return packed
before = compute()
child = os.fork()
if not child:
    os._exit(0 if compute() == before else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=DEADLINE_S).returncode == 0


def test_bytes_are_hashed_on_their_way_into_the_pool(values):
    pool, running = bytearray(8 * PIECE_BYTES), RunningSums([[memoryview(values[0])]])
    spans = [(PIECE_BYTES * 5, PIECE_BYTES + 3), (11, SIZES[0] - PIECE_BYTES - 3)]
    copy_to_pool(memoryview(pool), spans, [memoryview(values[0])], running)
    assert b"".join(pool[offset : offset + size] for offset, size in spans) == values[0]
    assert running.sums == [checksum([memoryview(values[0])])]
