"""A connection leaves nothing for the garbage collector: full collections of a large store are long."""

import asyncio
import gc
import weakref

import uvloop

from kvcore.wire import messages as m
from kvcore.wire.codec import FRAME_HEADER, encode_frame
from store_server.config import StoreConfig
from store_server.server import StoreServer


async def _talk_and_leave(server: StoreServer) -> asyncio.Event:
    """The event is set when the server's end does not exist any more."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.tcp_port)
    key = b"k" * 32
    requests = [
        (m.Hello(1, version=m.PROTOCOL_VERSION, client_name="test", planes=["tcp"]), b""),
        (m.Put(2, [key], [4], [0]), b"abcd"),
        (m.Read(3, [key]), b""),
        (m.Reserve(4, [b"r" * 32], [8]), b""),
    ]
    for request, payload in requests:
        writer.write(encode_frame(request, len(payload)) + payload)
        body_bytes, payload_bytes = FRAME_HEADER.unpack(await reader.readexactly(FRAME_HEADER.size))
        await reader.readexactly(body_bytes + payload_bytes)
    (connection,) = server._connections.values()
    gone = asyncio.Event()
    weakref.finalize(connection, gone.set)
    writer.close()
    await writer.wait_closed()
    return gone


def test_a_closed_connection_is_gone_without_the_garbage_collector():
    async def run() -> None:
        server = StoreServer(StoreConfig(port=0, pool_size_bytes=16 << 20))
        gc.disable()
        try:
            await server.start()
            gone = await _talk_and_leave(server)
            await asyncio.wait_for(gone.wait(), 20)
        finally:
            gc.enable()
            await server.stop()

    uvloop.run(run())
