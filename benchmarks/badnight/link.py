"""TCP that may go wrong: a relay between clients and a store that delays, stops, cuts, ends in the middle of
what is sent, and changes bits."""

import asyncio
import contextlib
import random

_READ_BYTES = 64 << 10


class Link:
    """In front of `target_port`. On an event loop; what is set applies at once to all connections."""

    def __init__(self, target_port: int, seed: str) -> None:
        self.delay_s = 0.0  # of each piece
        self.flip_every_bytes = 0  # of either direction, on average; 0: never
        self.truncates = False  # the next piece of more than a few bytes is the last, and only half of it
        self.num_flipped = 0
        self.port = 0
        self._target_port = target_port
        self._rng = random.Random(seed)
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._server: asyncio.Server | None = None
        self._relays: set[asyncio.Task[None]] = set()
        self._connections: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0, limit=_READ_BYTES)
        self.port = self._server.sockets[0].getsockname()[1]

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def stall(self) -> None:
        """Nothing goes through until `flow`; connections stay."""
        self._flowing.clear()

    def flow(self) -> None:
        self._flowing.set()

    def cut(self) -> None:
        """All connections, at both ends."""
        for ends in list(self._connections):
            for end in ends:
                end.transport.abort()

    async def close(self) -> None:
        self.flow()
        if self._server is not None:
            self._server.close()
            self.cut()
            await self._server.wait_closed()
            await asyncio.gather(*self._relays, return_exceptions=True)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if (relay := asyncio.current_task()) is not None:
            self._relays.add(relay)
            relay.add_done_callback(self._relays.discard)
        try:
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.transport.abort()
            return
        ends = (writer, there_writer)
        self._connections.add(ends)
        pumps = [
            asyncio.create_task(self._pump(reader, there_writer)),
            asyncio.create_task(self._pump(there_reader, writer)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._connections.discard(ends)
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            for end in ends:
                end.transport.abort()
                with contextlib.suppress(OSError):
                    await end.wait_closed()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_READ_BYTES):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                await self._flowing.wait()
                if self.truncates and len(data) > 64:
                    self.truncates = False
                    writer.write(data[: len(data) // 2])
                    await writer.drain()
                    return
                writer.write(self._spoiled(data))
                await writer.drain()

    def _spoiled(self, data: bytes) -> bytes:
        if not self.flip_every_bytes or self._rng.random() * self.flip_every_bytes > len(data):
            return data
        spoiled = bytearray(data)
        spoiled[self._rng.randrange(len(data))] ^= 1 << self._rng.randrange(8)
        self.num_flipped += 1
        return bytes(spoiled)
