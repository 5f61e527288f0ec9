"""What a proxy in Python cannot do without: bytes from one socket to the other on uvloop, and nothing else.

`python relay.py PORT UPSTREAM_PORT...` on 127.0.0.1; one upstream connection a client, upstreams in turn.
"""

import asyncio
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import cast

import uvloop


class Side(asyncio.Protocol):
    """`pass_on` is the other side's `write` itself."""

    def __init__(self) -> None:
        self.other: Side | None = None
        self.pass_on: Callable[[bytes], object]  # set before anything can come
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        self.pass_on(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.abort()


class Client(Side):
    def __init__(self, upstream_ports: Iterator[int]) -> None:
        super().__init__()
        self._port = next(upstream_ports)
        self._early: list[bytes] = []
        self.pass_on = self._early.append

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._joining = asyncio.get_running_loop().create_task(self._join())

    async def _join(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            transport, upstream = await loop.create_connection(Side, "127.0.0.1", self._port)
        except OSError:
            cast(asyncio.Transport, self.transport).abort()
            return
        self.other, upstream.other = upstream, self
        upstream.pass_on = cast(asyncio.Transport, self.transport).write
        self.pass_on = transport.write
        transport.writelines(self._early)


async def serve(port: int, upstream_ports: list[int]) -> None:
    turns = itertools.cycle(upstream_ports)
    server = await asyncio.get_running_loop().create_server(lambda: Client(turns), "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), [int(port) for port in sys.argv[2:]]))
