"""A fast stand-in for an engine: the OpenAI shapes on raw asyncio + httptools, one timer for all streams.

Run alone it serves until it is ended: `python benchmarks/router_engine.py --step-ms 5`; it prints its port.
"""

import argparse
import asyncio
from typing import Any

import httptools
import msgspec
import uvloop

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"cache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n"
)
_EVENT = (
    b'data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1700000000,'
    b'"model":"mock","choices":[{"index":0,"delta":{"content":" token"},"logprobs":null,'
    b'"finish_reason":null}]}\n\n'
)
_ANSWER = msgspec.json.encode(
    {
        "id": "chatcmpl-0123456789abcdef",
        "object": "chat.completion",
        "created": 1700000000,
        "model": "mock",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": " token" * 8}, "finish_reason": "length"}
        ],
        "usage": {"prompt_tokens": 10, "completion_tokens": 8, "total_tokens": 18},
    }
)
_WHOLE_ANSWER = _HEAD % len(_ANSWER) + _ANSWER
_CHUNK = b"%x\r\n%b\r\n" % (len(_EVENT), _EVENT)
_LAST_CHUNKS = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


class Body(msgspec.Struct):
    stream: bool = False
    max_tokens: int | None = None
    max_completion_tokens: int | None = None  # what sglang-router makes of the other one

    @property
    def num_tokens(self) -> int:
        return self.max_tokens or self.max_completion_tokens or 8


_DECODER = msgspec.json.Decoder(Body)


class EngineConnection(asyncio.Protocol):
    def __init__(self, streams: dict["EngineConnection", int], *, at_once: bool) -> None:
        self._streams = streams
        self._at_once = at_once
        self._parser = httptools.HttpRequestParser(self)
        self._body: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._streams.pop(self, None)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_message_complete(self) -> None:
        raw = b"".join(self._body)
        self._body.clear()
        body = _DECODER.decode(raw) if raw else Body()
        if body.stream:
            self.transport.write(_STREAM_HEAD)
            self._streams[self] = body.num_tokens
            if self._at_once and body.num_tokens > 1:
                self._streams[self] -= 1
                self.transport.write(_CHUNK)
        else:
            self.transport.write(_WHOLE_ANSWER)


def step(streams: dict[EngineConnection, int]) -> None:
    """One token for every running stream, as an engine's step gives them."""
    for connection, left in list(streams.items()):
        if left > 1:
            streams[connection] = left - 1
            connection.transport.write(_CHUNK)
        else:
            del streams[connection]
            connection.transport.write(_CHUNK + _LAST_CHUNKS)


async def serve(port: int, step_s: float, *, at_once: bool) -> None:
    loop = asyncio.get_running_loop()
    streams: dict[EngineConnection, int] = {}
    server = await loop.create_server(
        lambda: EngineConnection(streams, at_once=at_once), "127.0.0.1", port, backlog=2048
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    while True:
        await asyncio.sleep(step_s)
        step(streams)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument(
        "--at-once",
        action="store_true",
        help="the first token of a stream right after its head, not at a step",
    )
    args = parser.parse_args()
    uvloop.run(serve(args.port, args.step_ms / 1e3, at_once=args.at_once))


if __name__ == "__main__":
    main()
