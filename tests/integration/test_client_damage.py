"""Bytes that changed on their way into the store reach no reader, by whatever plane it reads."""

import asyncio
import contextlib
import random
import threading
from collections.abc import Iterator

import pytest
from badnight.link import Link

from kvcore.client.sync_client import StoreClient
from kvcore.transport.base import WriteBatch
from kvcore.wire.messages import Status
from tests.integration.store_harness import eventually
from tests.integration.store_process import StoreProcess

KEY = b"damage" + bytes(26)
LAYER_BYTES = 400_000
SOON_S = 60.0
GONE = (Status.UNAVAILABLE, Status.TIMED_OUT)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    store = StoreProcess(tmp_path_factory.mktemp("damage"), pool="16mb").start()
    yield store
    assert store.stop() == 0


def write_damaged(writer: StoreClient) -> None:
    """The second of its layers is not what its checksum says."""
    assert writer.reserve([KEY], 2 * LAYER_BYTES, 2) == [Status.OK]
    buffer = bytes(2 * LAYER_BYTES)
    batch = WriteBatch(keys=[KEY], buffers=[buffer], layer_begin=0, layer_end=2, checksums=[0, 4711])
    assert writer.plane.submit(batch).wait() == [Status.OK]


def test_what_came_over_tcp_is_checked_by_who_reads_it_from_shared_memory(store: StoreProcess) -> None:
    with (
        StoreClient.connect(store.address, planes=("tcp",), timeout_ms=SOON_S * 1e3) as writer,
        StoreClient.connect(store.address, planes=("shm",), timeout_ms=SOON_S * 1e3) as reader,
    ):
        write_damaged(writer)
        layers = [reader.read_layers([KEY], n, n + 1, [bytearray(LAYER_BYTES)]) for n in range(2)]
        assert [layer.wait() for layer in layers] == [[Status.OK], [Status.CORRUPT]]
        eventually(lambda: not writer.exists(KEY))
        write_damaged(writer)
        assert reader.get_view(KEY) is None
        eventually(lambda: not writer.exists(KEY))
        assert writer.put(KEY, b"w" * LAYER_BYTES) == Status.OK
        assert reader.get(KEY) == b"w" * LAYER_BYTES
        writer.remove(KEY, force=True)


def test_what_never_left_the_host_is_not(store: StoreProcess) -> None:
    with StoreClient.connect(store.address, planes=("shm",), timeout_ms=SOON_S * 1e3) as client:
        write_damaged(client)
        assert client.read_layers([KEY], 1, 2, [bytearray(LAYER_BYTES)]).wait() == [Status.OK]
        client.remove(KEY, force=True)


@contextlib.contextmanager
def link_to(port: int) -> Iterator[Link]:
    """On an event loop of its own; what it does to the bytes may be set from here."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    link = Link(port, "damage")
    try:
        asyncio.run_coroutine_threadsafe(link.start(), loop).result(SOON_S)
        yield link
        asyncio.run_coroutine_threadsafe(link.close(), loop).result(SOON_S)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(SOON_S)
        loop.close()


def test_a_link_that_changes_bits_costs_misses_and_no_wrong_byte(store: StoreProcess) -> None:
    """Of everything that goes through it: payloads, checksums, messages, lengths, in both directions."""
    values = [random.Random(number).randbytes(100_000) for number in range(64)]
    missed = {"tcp": 0, "shm": 0}
    with (
        link_to(store.port) as link,
        StoreClient.connect(link.address, planes=("tcp",)) as far,
        StoreClient.connect(store.address, planes=("shm",), timeout_ms=SOON_S * 1e3) as near,
    ):
        link.flip_every_bytes = 200_000
        for number, value in enumerate(values):
            # A changed message ends the connection, which is made anew.
            eventually(lambda: far.put(f"value {number}", value) not in GONE)  # noqa: B023
        for plane, client in (("shm", near), ("tcp", far)):
            for number, value in enumerate(values):
                found = client.get(f"value {number}")
                assert found is None or found == value, f"value {number} by {plane}"
                missed[plane] += found is None
        assert link.num_flipped > 10
    assert 0 < missed["shm"] < len(values) and missed["tcp"] >= missed["shm"]
