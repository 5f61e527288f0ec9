"""Connections to stores are opened once each, and none waits for another."""

import asyncio
from typing import Any

import pytest

from kvcore.client.async_client import AsyncStoreClient
from router.store_links import StoreLinks


class Opened:
    """Stands for AsyncStoreClient.connect: an address of `hanging` is not connected before `let_go`."""

    def __init__(self, hanging: str) -> None:
        self.addresses: list[str] = []
        self.let_go = asyncio.Event()
        self._hanging = hanging

    async def connect(self, address: str, **_: Any) -> object:
        self.addresses.append(address)
        if address == self._hanging:
            await self.let_go.wait()
        return self


@pytest.fixture
def links() -> StoreLinks:
    return StoreLinks({"silent": "tcp://silent:1", "good": "tcp://good:1"}, token="")


def test_a_store_that_hangs_keeps_nobody_from_another(
    links: StoreLinks, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        opened = Opened("tcp://silent:1")
        monkeypatch.setattr(AsyncStoreClient, "connect", opened.connect)
        waiting = asyncio.create_task(links.client("silent"))
        await asyncio.sleep(0)
        assert opened.addresses == ["tcp://silent:1"]
        await asyncio.wait_for(links.client("good"), 30)
        assert not waiting.done() and opened.addresses == ["tcp://silent:1", "tcp://good:1"]
        opened.let_go.set()
        await waiting

    asyncio.run(main())


def test_one_connection_for_all_who_ask_at_once(links: StoreLinks, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        opened = Opened("tcp://silent:1")
        monkeypatch.setattr(AsyncStoreClient, "connect", opened.connect)
        asking = [asyncio.create_task(links.client("silent")) for _ in range(3)]
        await asyncio.sleep(0)
        opened.let_go.set()
        found = await asyncio.gather(*asking)
        assert found[0] is found[1] is found[2] and opened.addresses == ["tcp://silent:1"]
        assert await links.client("silent") is found[0]

    asyncio.run(main())
