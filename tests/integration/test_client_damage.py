"""Bytes that changed on their way into the store reach no reader, by whatever plane it reads."""

import time
from collections.abc import Iterator

import pytest

from kvcore.client.sync_client import StoreClient
from kvcore.transport.base import WriteBatch
from kvcore.wire.messages import Status
from tests.integration.store_process import StoreProcess

KEY = b"damage" + bytes(26)
LAYER_BYTES = 400_000
SOON_S = 60.0


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


def wait_until_it_is_gone(client: StoreClient) -> None:
    deadline = time.monotonic() + SOON_S
    while client.exists(KEY):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_came_over_tcp_is_checked_by_who_reads_it_from_shared_memory(store: StoreProcess) -> None:
    with (
        StoreClient.connect(store.address, planes=("tcp",), timeout_ms=SOON_S * 1e3) as writer,
        StoreClient.connect(store.address, planes=("shm",), timeout_ms=SOON_S * 1e3) as reader,
    ):
        write_damaged(writer)
        layers = [reader.read_layers([KEY], n, n + 1, [bytearray(LAYER_BYTES)]) for n in range(2)]
        assert [layer.wait() for layer in layers] == [[Status.OK], [Status.CORRUPT]]
        wait_until_it_is_gone(writer)
        write_damaged(writer)
        assert reader.get_view(KEY) is None
        wait_until_it_is_gone(writer)
        assert writer.put(KEY, b"w" * LAYER_BYTES) == Status.OK
        assert reader.get(KEY) == b"w" * LAYER_BYTES
        writer.remove(KEY, force=True)


def test_what_never_left_the_host_is_not(store: StoreProcess) -> None:
    with StoreClient.connect(store.address, planes=("shm",), timeout_ms=SOON_S * 1e3) as client:
        write_damaged(client)
        assert client.read_layers([KEY], 1, 2, [bytearray(LAYER_BYTES)]).wait() == [Status.OK]
        client.remove(KEY, force=True)
