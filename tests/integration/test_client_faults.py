"""The client against a store that dies, hangs, refuses, forgets, lies or is asked too much."""

import asyncio
import contextlib
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvcore.client.async_client import AsyncStoreClient
from kvcore.client.sync_client import StoreClient
from kvcore.errors import ConfigError, RequestRefused
from kvcore.keys import object_key
from kvcore.transport.base import ReadBatch, WriteBatch
from kvcore.wire.messages import Status
from tests.integration.store_process import PATIENT, StoreProcess, hold_port

KEY = b"faults" + bytes(26)
SOON_S = 30.0
PLANES = [("tcp",), ("shm", "tcp")]


def eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline, "did not come true in time"
        time.sleep(0.005)


def num_open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def store(tmp_path):
    store = StoreProcess(tmp_path / "store", pool="64mb").start()
    yield store
    store.stop()


@pytest.mark.parametrize("planes", PLANES)
def test_kill_and_restart(store, planes):
    with StoreClient.connect(store.address, planes=planes, **PATIENT) as client:
        assert client.put("before", bytes(300_000)) == Status.OK
        assert client.reserve([KEY], 400_000, 2) == [Status.OK]
        waiting = client.read_layers([b"never" + bytes(27)], 0, 1, [bytearray(5)], wait_ms=60_000)
        timer = threading.Timer(0.1, store.kill)
        timer.start()
        assert waiting.wait() == [Status.UNAVAILABLE]
        timer.join()
        assert not client.connected
        assert client.get("before") is None and client.put("x", b"x") == Status.UNAVAILABLE
        assert not client.lookup([KEY]).available
        store.start()
        eventually(lambda: client.connected)
        # The old reservation is of the old store; nothing may be written on its word.
        assert client.write_layers([KEY], 0, 1, [bytes(200_000)]).wait() == [Status.ABANDONED]
        assert client.get("before") is None
        assert client.put("after", b"y" * 300_000) == Status.OK
        assert client.get("after") == b"y" * 300_000
        counters = client.counters()
        assert counters["connections_lost_total"] == 1 and counters["connects_total"] == 2
        assert counters["plane"] == planes[0]


def test_a_store_that_comes_later(tmp_path):
    with hold_port() as held, StoreClient.connect(f"127.0.0.1:{held.getsockname()[1]}") as client:
        assert not client.connected and client.get("x") is None
        assert client.batch_exists(["a", "b"]) == [False, False]
        assert client.stats() == {} and client.evict() == (0, 0) and client.list_keys() == ([], 0)
        assert client.counters()["state"] == "connecting" and client.counters()["last_error"]
        store = StoreProcess(tmp_path, "--port", str(held.getsockname()[1]), pool="16mb").start()
        try:
            eventually(lambda: client.connected)
            assert client.put("x", b"1") == Status.OK
        finally:
            store.stop()


def test_a_store_that_hangs_is_left_alone_until_it_wakes(store):
    with StoreClient.connect(store.address, silence_ms=150, connect_timeout_ms=300) as client:
        client.put("x", b"1")
        store.send(signal.SIGSTOP)
        try:
            eventually(lambda: not client.lookup([KEY], timeout_ms=20).available and not client.connected)
            assert client.get("x") is None
        finally:
            store.send(signal.SIGCONT)
        # It may be slow again for as long as this client takes for silence.
        eventually(lambda: client.get("x") == b"1")


def test_refusals_are_raised_by_connect_only(tmp_path):
    store = StoreProcess(tmp_path, "--token", "secret", pool="16mb").start()
    try:
        with pytest.raises(RequestRefused, match="token"):
            StoreClient.connect(store.address, token="wrong")
        with StoreClient(store.address, token="wrong") as quiet:
            eventually(lambda: "token" in str(quiet.counters()["last_error"]))
            assert quiet.get("x") is None
        with StoreClient.connect(store.address, token="secret") as client:
            assert client.put("x", b"1") == Status.OK
    finally:
        store.stop()


def hang_up(listener: socket.socket) -> None:
    """As a store that cannot read what it is sent."""
    with contextlib.suppress(OSError):
        while True:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)


def test_who_is_hung_up_on_instead_of_greeted_says_what_that_may_mean():
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=hang_up, args=(listener,))
    thread.start()
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    try:
        with StoreClient.connect(address) as client:
            assert not client.connected and "another version" in client.counters()["last_error"]

        async def main() -> None:
            async with await AsyncStoreClient.connect(address) as other:
                assert not other.connected and "another version" in other.last_error

        asyncio.run(main())
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(SOON_S)


@pytest.mark.parametrize(
    "address", ["", "host:port", "http://x:1", "unix://relative", "a/b", "127.0.0.1:99999"]
)
def test_addresses_that_make_no_sense_say_what_would(address):
    with pytest.raises(ConfigError, match="store address"):
        StoreClient(address)


def test_unknown_planes_are_refused():
    with pytest.raises(ConfigError, match=r"unknown plane 'rmda': choose from"):
        StoreClient("127.0.0.1:1", planes=("rmda",))


def test_the_plane_falls_back_and_says_why(tmp_path):
    store = StoreProcess(tmp_path, "--planes", "tcp", pool="16mb").start()
    try:
        with StoreClient.connect(store.address) as client:
            counters = client.counters()
            assert (
                counters["plane"] == "tcp" and "shm: the store does not have it" in counters["plane_reason"]
            )
    finally:
        store.stop()


def use_in_child(client: StoreClient, results) -> None:
    eventually(lambda: client.connected)
    results.put((client.get("parent"), client.put("child", b"c" * 300_000), client.counters()["plane"]))
    client.close()


@pytest.mark.parametrize("planes", PLANES)
def test_after_a_fork_both_go_on(store, planes):
    context = multiprocessing.get_context("fork")
    with StoreClient.connect(store.address, planes=planes, **PATIENT) as client:
        value = os.urandom(400_000)
        assert client.put("parent", value) == Status.OK
        assert client.reserve([KEY], 10, 1) == [Status.OK]
        results = context.Queue()
        child = context.Process(target=use_in_child, args=(client, results))
        child.start()
        assert results.get(timeout=SOON_S) == (value, Status.OK, planes[0])
        child.join(SOON_S)
        assert child.exitcode == 0
        assert client.get("child") == b"c" * 300_000
        # The parent's connection, and what hangs on it, has not noticed anything.
        assert client.write_layers([KEY], 0, 1, [b"0123456789"]).wait() == [Status.OK]
        assert client.counters()["connections_lost_total"] == 0
        results.close()
        results.join_thread()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"planes": ("tcp",)}, Status.CORRUPT),
        ({"planes": ("shm",), "verify_shm": True}, Status.CORRUPT),
        ({"planes": ("shm",)}, Status.OK),
        ({"planes": ("tcp",), "checksums": False}, Status.OK),
    ],
)
def test_bytes_that_do_not_match_their_checksum(store, options, expected):
    size_bytes = 400_000
    with (
        StoreClient.connect(store.address, **PATIENT) as writer,
        StoreClient.connect(store.address, **PATIENT, **options) as reader,
    ):
        assert writer.reserve([KEY], 2 * size_bytes, 2) == [Status.OK]
        batch = WriteBatch(
            keys=[KEY], buffers=[bytes(2 * size_bytes)], layer_begin=0, layer_end=2, checksums=[0, 4711]
        )
        assert writer.plane.submit(batch).wait() == [Status.OK]
        first = reader.read_layers([KEY], 0, 1, [bytearray(size_bytes)])
        assert first.wait() == [Status.OK]
        second = reader.read_layers([KEY], 1, 2, [bytearray(size_bytes)])
        assert second.wait() == [expected]
        if expected is Status.CORRUPT:
            assert reader.counters()["corrupt_total"] == 1
            eventually(lambda: not writer.exists(KEY))


def test_a_read_outlasts_its_lease_by_asking_again_or_is_a_miss(tmp_path):
    store = StoreProcess(tmp_path, "--default-lease-ms", "500", pool="16mb").start()
    size_bytes = 400_000
    try:
        with StoreClient.connect(store.address, planes=("shm",)) as client:
            value = os.urandom(size_bytes)
            assert client.put(KEY, value) == Status.OK
            buffer = bytearray(size_bytes)
            late = client.plane.submit(ReadBatch(keys=[KEY], buffers=[buffer]))
            time.sleep(0.6)
            assert late.wait() == [Status.OK] and buffer == value

            def slow_sink(index: int, size: int) -> list[memoryview]:
                time.sleep(0.6)
                return [memoryview(buffer)]

            too_slow = client.plane.submit_read([KEY], [size_bytes], slow_sink)
            assert too_slow.wait() == [Status.TIMED_OUT]
            eventually(lambda: client.stats()["leases"] == 0)
    finally:
        store.stop()


def test_batches_are_cut_to_the_stores_limits(tmp_path):
    store = StoreProcess(tmp_path, "--max-payload-bytes", "1mb", "--max-keys", "10", pool="64mb").start()
    try:
        for planes, large in [(("tcp",), Status.TOO_LARGE), (("shm",), Status.OK)]:
            with StoreClient.connect(store.address, planes=planes, **PATIENT) as client:
                names = [f"{planes[0]} {number}" for number in range(64)]
                values = [os.urandom(60_000) for _ in names]
                assert client.batch_put_from(names, values) == [Status.OK] * 64
                assert client.batch_exists(names) == [True] * 64
                buffers = [bytearray(60_000) for _ in names]
                assert client.batch_get_into(names, buffers) == [60_000] * 64 and buffers == values
                keys = [bytes([number]) + planes[0].encode() + bytes(28) for number in range(64)]
                assert client.reserve(keys, 60_000, 2) == [Status.OK] * 64
                for layer in range(2):
                    pieces = [value[30_000 * layer : 30_000 * (layer + 1)] for value in values]
                    assert client.write_layers(keys, layer, layer + 1, pieces).wait() == [Status.OK] * 64
                assert client.lookup([*keys, b"no"]).num_hits == 64
                read = client.read_layers(keys, 0, 2, buffers)
                assert read.wait() == [Status.OK] * 64 and buffers == values
                assert client.put(f"large {planes}", bytes(3 << 20)) == large
                client.abort(keys)
    finally:
        store.stop()


def test_sizes_of_one_batch_may_differ(store):
    with StoreClient.connect(store.address, planes=("tcp",), **PATIENT) as client:
        keys = [bytes([number]) * 32 for number in range(6)]
        sizes = [100, 200, 100, 300, 200, 100]
        for key, size in zip(keys, sizes, strict=True):
            assert client.reserve([key], size, 1) == [Status.OK]
        values = [os.urandom(size) for size in sizes]
        assert client.write_layers(keys, 0, 1, values).wait() == [Status.OK] * 6
        buffers = [bytearray(size) for size in sizes]
        assert client.read_layers(keys, 0, 1, buffers).wait() == [Status.OK] * 6 and buffers == values


def test_a_reader_that_gives_up_early_hurts_nobody(store):
    with StoreClient.connect(store.address, planes=("tcp",)) as client:
        value = os.urandom(4 << 20)
        assert client.put("value", value) == Status.OK
        statuses = set()
        for attempt in range(40):
            buffer = bytearray(len(value))
            read = client.read_layers([object_key("value")], 0, 1, [buffer])
            statuses.add(read.wait(timeout_ms=0.05 * attempt)[0])
            held = bytes(buffer)
            eventually(lambda: client.connected)
            assert client.get("value") == value
            if read.wait() != [Status.OK]:
                assert buffer == held
        assert statuses <= {Status.OK, Status.TIMED_OUT, Status.UNAVAILABLE} and Status.TIMED_OUT in statuses


def test_closing_while_others_use_it(store):
    client = StoreClient.connect(store.address)
    client.put("value", os.urandom(1 << 20))
    failures: list[BaseException] = []

    def work() -> None:
        try:
            while client.counters()["state"] != "closed":
                client.get("value")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    client.close()
    for thread in threads:
        thread.join(SOON_S)
    assert failures == [] and not any(thread.is_alive() for thread in threads)


def test_nothing_is_left_behind(store):
    before, threads_before = num_open_files(), set(threading.enumerate())
    for _ in range(5):
        with StoreClient.connect(store.address) as client:
            client.put("x", bytes(200_000))
    with contextlib.suppress(RequestRefused):
        StoreClient.connect("127.0.0.1:1").close()
    assert num_open_files() == before
    assert set(threading.enumerate()) <= threads_before
