"""What every remote backend must do, whatever is behind it."""

import asyncio
import os
from collections.abc import Callable, Coroutine
from typing import Any

from store_server.remote.backend import RemoteBackend, make_backend
from store_server.remote.config import RemoteConfig

DEADLINE_S = 60.0


async def all_names(backend: RemoteBackend) -> list[str]:
    return sorted([name async for names in backend.list() for name in names])


class RemoteBackendContract:
    """A subclass gives `remote`, a fixture with the settings of an empty remote."""

    def run(self, remote: RemoteConfig, work: Callable[[RemoteBackend], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            backend = make_backend(remote)
            try:
                await work(backend)
            finally:
                await backend.close()

        asyncio.run(asyncio.wait_for(main(), DEADLINE_S))

    def test_what_was_put_is_got(self, remote: RemoteConfig) -> None:
        value = os.urandom(3 << 20)

        async def work(backend: RemoteBackend) -> None:
            await backend.put("ab/cdab.1.3", value)
            assert bytes(await backend.get("ab/cdab.1.3") or b"") == value

        self.run(remote, work)

    def test_putting_again_replaces(self, remote: RemoteConfig) -> None:
        async def work(backend: RemoteBackend) -> None:
            await backend.put("ab/cdab.1.3", b"old and longer")
            await backend.put("ab/cdab.1.3", b"new")
            assert bytes(await backend.get("ab/cdab.1.3") or b"") == b"new"
            assert await all_names(backend) == ["ab/cdab.1.3"]

        self.run(remote, work)

    def test_what_is_not_there_is_none(self, remote: RemoteConfig) -> None:
        async def work(backend: RemoteBackend) -> None:
            assert await backend.get("no/such.1.1") is None
            assert await all_names(backend) == []

        self.run(remote, work)

    def test_listing_shows_all_names(self, remote: RemoteConfig) -> None:
        names = sorted(f"{number % 7:02x}/{number:08x}/{number:04x}.2.{number + 1}" for number in range(1200))

        async def work(backend: RemoteBackend) -> None:
            await asyncio.gather(*(backend.put(name, b"x") for name in names[:50]))
            for first in range(50, len(names), 50):
                await asyncio.gather(*(backend.put(name, b"x") for name in names[first : first + 50]))
            assert await all_names(backend) == names

        self.run(remote, work)

    def test_deleted_names_are_gone_and_unknown_ones_do_no_harm(self, remote: RemoteConfig) -> None:
        names = [f"aa/{number:02x}.1.1" for number in range(20)]

        async def work(backend: RemoteBackend) -> None:
            for name in names:
                await backend.put(name, b"x")
            await backend.delete([names[0]])
            await backend.delete(["aa/ff.1.1", *names[:19]])
            assert await all_names(backend) == names[19:]

        self.run(remote, work)

    def test_requests_at_the_same_time_do_not_mix(self, remote: RemoteConfig) -> None:
        values = {f"00/{number:04x}.1.1": bytes([number]) * (1000 * number + 1) for number in range(60)}

        async def work(backend: RemoteBackend) -> None:
            await asyncio.gather(*(backend.put(name, value) for name, value in values.items()))
            got = await asyncio.gather(*(backend.get(name) for name in values))
            assert [bytes(value or b"") for value in got] == list(values.values())

        self.run(remote, work)
