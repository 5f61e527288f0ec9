"""The asyncio client against a real store, on asyncio's own loop and on uvloop."""

import asyncio
import os
import signal
import time

import pytest
import uvloop

from kvcore.client.async_client import AsyncStoreClient
from kvcore.client.sync_client import StoreClient
from kvcore.errors import RequestRefused
from kvcore.transport.base import WriteBatch
from kvcore.wire.messages import PinKind, Status, Tier
from tests.integration.store_process import StoreProcess

KEY = b"async" + bytes(27)
SOON_S = 30.0


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    store = StoreProcess(tmp_path_factory.mktemp("async"), pool="64mb").start()
    yield store
    assert store.stop() == 0


@pytest.fixture
def own_store(tmp_path):
    store = StoreProcess(tmp_path, pool="16mb").start()
    yield store
    store.stop()


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def run(request):
    return request.param


async def eventually(condition) -> None:
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline, "did not come true in time"
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("scheme", ["tcp", "unix"])
def test_the_whole_face(store, run, scheme):
    async def main() -> None:
        address = store.address if scheme == "tcp" else store.unix_address
        async with await AsyncStoreClient.connect(address) as client:
            name, value = os.urandom(8).hex(), os.urandom(3 << 20)
            assert await client.get(name) is None and not await client.exists(name)
            assert await client.put(name, value) == Status.OK
            assert await client.put(name, b"other") == Status.EXISTS
            assert await client.get(name) == value
            assert await client.batch_exists(["no", name, "no"]) == [False, True, False]
            assert (await client.stats())["objects"] >= 1
            assert await client.remove(name) == Status.OK and await client.get(name) is None
            with pytest.raises(ValueError, match="empty"):
                await client.put(name, b"")
            assert await client.put(name, memoryview(bytes(2 << 30))) == Status.TOO_LARGE
        assert not client.connected and await client.get(name) is None

    run(main())


def test_it_sees_what_engines_write(store, run):
    async def main() -> None:
        async with await AsyncStoreClient.connect(store.address) as client:
            with StoreClient.connect(store.address) as engine:
                keys = [os.urandom(32) for _ in range(3)]
                assert engine.reserve(keys, 100, 2) == [Status.OK] * 3
                assert engine.write_layers(keys, 0, 1, [bytes(50)] * 3).wait() == [Status.OK] * 3
                assert (await client.lookup(keys)).num_hits == 0
                pending = await client.lookup([*keys, b"no" * 16], include_pending=True)
                assert (pending.num_hits, list(pending.layers_ready)) == (3, [1, 1, 1])
                assert (await client.lookup([])).available
                engine.abort(keys)

    run(main())


def test_hundreds_of_calls_at_once_get_their_own_answers(store, run):
    async def main() -> None:
        async with await AsyncStoreClient.connect(store.address) as client:
            values = {f"{os.urandom(6).hex()} {number}": os.urandom(20_000) for number in range(200)}
            statuses = await asyncio.gather(*(client.put(name, value) for name, value in values.items()))
            assert set(statuses) == {Status.OK}
            assert await asyncio.gather(*map(client.get, values)) == list(values.values())
            # A caller that goes away takes nobody else's answer with it.
            hurried = [asyncio.create_task(client.get(name)) for name in values]
            await asyncio.sleep(0)
            for task in hurried[::2]:
                task.cancel()
            rest = await asyncio.gather(*hurried[1::2])
            assert rest == list(values.values())[1::2] and client.connected

    run(main())


def test_corrupt_bytes_are_a_miss(store, run):
    async def main() -> None:
        async with await AsyncStoreClient.connect(store.address) as client:
            key = os.urandom(32)
            with StoreClient.connect(store.address) as engine:
                assert engine.reserve([key], 100, 1) == [Status.OK]
                batch = WriteBatch(
                    keys=[key], buffers=[bytes(100)], layer_begin=0, layer_end=1, checksums=[4711]
                )
                assert engine.plane.submit(batch).wait() == [Status.OK]
            assert await client.get(key) is None

    run(main())


def test_the_store_dies_and_comes_back(own_store, run):
    async def main() -> None:
        async with await AsyncStoreClient.connect(own_store.address) as client:
            assert await client.put("x", b"1") == Status.OK
            own_store.kill()
            await eventually(lambda: not client.connected)
            assert await client.get("x") is None and not (await client.lookup([KEY])).available
            assert await client.stats() == {} and await client.put("x", b"1") == Status.UNAVAILABLE
            own_store.start()
            await eventually(lambda: client.connected)
            assert await client.put("x", b"2") == Status.OK and await client.get("x") == b"2"

    run(main())


def test_a_store_that_hangs_is_left_alone(own_store, run):
    async def main() -> None:
        async with await AsyncStoreClient.connect(
            own_store.address, silence_ms=100, connect_timeout_ms=300
        ) as client:
            own_store.send(signal.SIGSTOP)
            try:
                deadline = time.monotonic() + SOON_S
                while client.connected and time.monotonic() < deadline:
                    assert not (await client.lookup([KEY], timeout_ms=20)).available
                assert not client.connected
            finally:
                own_store.send(signal.SIGCONT)
            await eventually(lambda: client.connected)

    run(main())


def test_a_store_that_hangs_while_it_is_sent_something_is_left_alone(own_store, run, caplog):
    async def main() -> None:
        async with await AsyncStoreClient.connect(
            own_store.address, silence_ms=100, connect_timeout_ms=300, timeout_ms=50
        ) as client:
            own_store.send(signal.SIGSTOP)
            try:
                deadline = time.monotonic() + SOON_S
                while client.connected and time.monotonic() < deadline:
                    put = await client.put("x", bytes(8 << 20))
                    assert put in (Status.TIMED_OUT, Status.UNAVAILABLE)
                assert not client.connected and "has been silent" in caplog.text
            finally:
                own_store.send(signal.SIGCONT)
            await eventually(lambda: client.connected)

    run(main())


def test_refused_or_absent(tmp_path, run):
    async def main() -> None:
        store = StoreProcess(tmp_path, "--token", "secret", pool="16mb").start()
        try:
            with pytest.raises(RequestRefused, match="token"):
                await AsyncStoreClient.connect(store.address, token="wrong")
        finally:
            store.stop()
        absent = await AsyncStoreClient.connect(store.address, token="secret")
        assert not absent.connected and absent.last_error
        store.start()
        try:
            await eventually(lambda: absent.connected)
            await absent.close()
        finally:
            store.stop()

    run(main())


def test_managing_objects(store, run):
    async def manage() -> None:
        async with await AsyncStoreClient.connect(store.address) as client:
            assert await client.put("async pinned", b"12345") == Status.OK
            assert await client.pin("async pinned", PinKind.HARD) == Status.OK
            pinned, absent = await client.describe(["async pinned", "async absent"])
            assert absent is None and pinned is not None
            assert (pinned.size_bytes, pinned.pin, pinned.tier) == (5, PinKind.HARD, Tier.DRAM)
            assert [await client.get_size(name) for name in ("async pinned", "async absent")] == [5, -1]
            await client.evict()
            assert await client.batch_status(["async pinned", "x"]) == [Status.OK, Status.MISSING]
            assert await client.prefetch(["async pinned", "x"]) == [Status.OK, Status.MISSING]
            assert pinned.key in [info.key for info in (await client.list_keys())[0]]
            assert await client.remove("async pinned") == Status.LEASED
            assert await client.unpin("async pinned") == Status.OK
            assert await client.batch_remove(["async pinned", "x"]) == [Status.OK, Status.MISSING]

    run(manage())


def test_managing_without_a_store(own_store, run):
    async def manage() -> None:
        async with await AsyncStoreClient.connect(own_store.address) as client:
            own_store.kill()
            assert await client.batch_status(["a", "b"]) == [Status.UNAVAILABLE] * 2
            assert await client.describe(["a"]) == [None] and await client.get_size("a") == -1
            assert await client.prefetch(["a"]) == [Status.UNAVAILABLE]
            assert await client.pin("a") == Status.UNAVAILABLE
            assert await client.evict() == (0, 0) and await client.list_keys() == ([], 0)
            assert await client.stats() == {}

    run(manage())
