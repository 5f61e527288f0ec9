"""A store and its clients in one process, on RDMA devices that are none: what the rdma plane does is the
same."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from kvcore.client.sync_client import StoreClient
from kvcore.transport import rdma_host
from kvcore.transport.verbs_fake import FakeFabric
from store_server.config import StoreConfig
from store_server.server import StoreServer
from tests.integration.store_harness import DEADLINE_S
from tests.integration.store_process import PATIENT

OpenClient = Callable[..., StoreClient]


class FakeRdmaStore:
    """`server` lives in a thread of its own; `run(action)` carries something out there."""

    def __init__(self, fabric: FakeFabric, **settings: Any) -> None:
        self.fabric = fabric
        self.config = msgspec.convert(
            {"port": 0, "admin_port": -1, "pool_size_bytes": 96 << 20, **settings}, StoreConfig
        )
        self.server: StoreServer
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._started.wait(DEADLINE_S)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.tcp_port}"

    def run(self, action: Callable[[], Any]) -> Any:
        async def call() -> Any:
            return action()

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(DEADLINE_S)

    def stats(self) -> dict[str, float]:
        stats: dict[str, float] = self.run(self.server.stats)
        return stats

    def stop(self) -> None:
        self.run(self.server.stopping.set)
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.server = StoreServer(self.config, load_verbs=lambda: self.fabric)
        await self.server.start()
        self._started.set()
        await self.server.stopping.wait()
        await self.server.stop()


@pytest.fixture(scope="module")
def fabric() -> FakeFabric:
    """Two devices of the store and two of its clients, for a whole file of tests."""
    return FakeFabric("store0", "store1", "client0", "client1")


@pytest.fixture(scope="module")
def rdma_store(fabric: FakeFabric) -> Iterator[FakeRdmaStore]:
    store = FakeRdmaStore(fabric, device_name="store0,store1")
    yield store
    store.stop()


@pytest.fixture
def open_any_client(
    rdma_store: FakeRdmaStore, fabric: FakeFabric, monkeypatch: pytest.MonkeyPatch
) -> Iterator[OpenClient]:
    """Clients of `rdma_store`, on both client devices if nothing else is said."""
    monkeypatch.setattr(rdma_host, "load_binding", lambda: fabric)
    closing = contextlib.ExitStack()

    def open_one(planes: tuple[str, ...] = ("rdma", "tcp"), **options: Any) -> StoreClient:
        options = {"device_name": "client0,client1", **PATIENT, **options}
        client = closing.enter_context(StoreClient.connect(rdma_store.address, planes=planes, **options))
        assert client.counters()["plane"] == planes[0], client.counters()
        return client

    with closing:
        yield open_one
        cleaner = open_one(("tcp",))
        for info in cleaner.list_keys()[0]:
            cleaner.remove(info.key, force=True)
