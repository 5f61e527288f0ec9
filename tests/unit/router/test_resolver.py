"""Names of engines: what they mean now, and while nobody answers for them."""

import asyncio
import socket
from typing import Any

import pytest

from router.http.fetch import Fetched, Probe, fetch
from router.http.resolver import Resolver
from router.http.upstream import UpstreamPool
from tests.integration.router_harness import MockEngine, async_test

SILENT, NONE = socket.EAI_AGAIN, socket.EAI_NONAME


class Names:
    """A name server. `error`: what it says instead, 0: nothing at all."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = addresses
        self.error: int | None = None
        self.num_asked = 0
        asyncio.get_running_loop().getaddrinfo = self._ask  # type: ignore[method-assign]

    async def _ask(self, host: str, port: int, **_: Any) -> list[Any]:
        self.num_asked += 1
        if self.error == 0:
            await asyncio.Event().wait()
        if self.error is not None:
            raise socket.gaierror(self.error, "an error")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in self.addresses]


@pytest.mark.parametrize("error", [SILENT, 0], ids=["says so", "hangs"])
def test_the_last_addresses_count_while_nobody_answers(error: int) -> None:
    @async_test
    async def check() -> None:
        names = Names("10.0.0.1", "10.0.0.2", "10.0.0.1")
        resolver = Resolver("engine.test", 80, timeout_s=0.05)
        assert await resolver.addresses() == ["10.0.0.1", "10.0.0.2"]
        names.addresses = ("10.0.0.3",)
        assert await resolver.addresses() == ["10.0.0.3"]
        names.error = error
        assert await resolver.addresses() == ["10.0.0.3"]
        # Nobody waits for it again at once.
        num_asked = names.num_asked
        assert await resolver.addresses() == ["10.0.0.3"] and names.num_asked == num_asked

    check()


def test_a_name_that_is_gone_is_gone() -> None:
    @async_test
    async def check() -> None:
        names = Names("10.0.0.1")
        resolver = Resolver("engine.test", 80, timeout_s=1)
        assert await resolver.addresses()
        names.error = NONE
        with pytest.raises(socket.gaierror):
            await resolver.addresses()

    check()


def test_an_address_is_asked_of_nobody() -> None:
    @async_test
    async def check() -> None:
        names = Names()
        for host in ("10.0.0.1", "::1", "fe80::1%eth0"):
            assert await Resolver(host, 80, timeout_s=1).addresses() == [host]
        assert not names.num_asked

    check()


@async_test
async def test_an_engine_stays_reachable_without_its_name() -> None:
    engine = await MockEngine("m").start()
    # 127.0.0.2: nobody listens there.
    names = Names("127.0.0.2", "127.0.0.1")
    pool = UpstreamPool("engine.test", engine.port, idle_timeout_s=-1.0, connect_timeout_s=30)

    async def ask() -> Fetched:
        return await fetch(Probe(pool), "/health", timeout_s=30)

    assert (await ask()).status == 200
    names.error = SILENT
    assert (await ask()).status == 200
    assert engine.num_connections == 2 and names.num_asked == 2
    await pool.close()
    stranger = UpstreamPool("other.test", engine.port, idle_timeout_s=-1.0, connect_timeout_s=30)
    fetched = await fetch(Probe(stranger), "/health", timeout_s=30)
    assert fetched.status == 0 and "cannot be reached" in fetched.failure
    await stranger.close()
    await engine.stop()
