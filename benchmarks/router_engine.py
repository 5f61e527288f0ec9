"""A fast stand-in for a vLLM engine: its HTTP answers on raw asyncio + httptools, one timer for all streams.

Run alone it serves until it is ended: `python benchmarks/router_engine.py --step-ms 5`; it prints its port.
What it answers besides completions is in routerbench/engine_api.py.
"""

import argparse
import asyncio
from collections import Counter
from typing import Any

import httptools
import msgspec
import uvloop
from routerbench.engine_api import CALLS_PATH, CHAT, COMPLETION, answer, error, response

_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"cache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n"
)
_CHAT_EVENT = (
    b'data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1700000000,'
    b'"model":"mock","choices":[{"index":0,"delta":{"content":" token"},"logprobs":null,'
    b'"finish_reason":null}]}\n\n'
)
_TEXT_EVENT = (
    b'data: {"id":"cmpl-0123456789abcdef","object":"text_completion","created":1700000000,'
    b'"model":"mock","choices":[{"index":0,"text":" token","logprobs":null,"finish_reason":null}]}\n\n'
)
_USAGE = {"prompt_tokens": 10, "completion_tokens": 8, "total_tokens": 18}
_WHOLE = {
    CHAT: {
        "id": "chatcmpl-0123456789abcdef",
        "object": "chat.completion",
        "created": 1700000000,
        "model": "mock",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": " token" * 8}, "finish_reason": "length"}
        ],
        "usage": _USAGE,
    },
    COMPLETION: {
        "id": "cmpl-0123456789abcdef",
        "object": "text_completion",
        "created": 1700000000,
        "model": "mock",
        "choices": [{"index": 0, "text": " token" * 8, "finish_reason": "length"}],
        "usage": _USAGE,
    },
}
_WHOLE_ANSWERS = {path: response(200, msgspec.json.encode(document)) for path, document in _WHOLE.items()}
_CHUNKS = {
    path: b"%x\r\n%b\r\n" % (len(event), event)
    for path, event in ((CHAT, _CHAT_EVENT), (COMPLETION, _TEXT_EVENT))
}
_NO_HTTP = response(400, b"Invalid HTTP request received.", b"text/plain; charset=utf-8")
_LAST_CHUNKS = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


class Body(msgspec.Struct):
    stream: bool = False
    max_tokens: int | None = None
    max_completion_tokens: int | None = None  # what sglang-router makes of the other one

    @property
    def num_tokens(self) -> int:
        return self.max_tokens or self.max_completion_tokens or 8


_DECODER = msgspec.json.Decoder(Body)


class Engine:
    """What all connections share. `streams`: tokens to come of each."""

    def __init__(self, *, at_once: bool, scale_out: bool) -> None:
        self.at_once = at_once
        self.scale_out = scale_out
        self.streams: dict[EngineConnection, int] = {}
        self.calls: Counter[bytes] = Counter()

    def step(self) -> None:
        """One token for every running stream, as an engine's step gives them."""
        for connection, left in list(self.streams.items()):
            if left > 1:
                self.streams[connection] = left - 1
                connection.transport.write(connection.chunk)
            else:
                del self.streams[connection]
                connection.transport.write(connection.chunk + _LAST_CHUNKS)


class EngineConnection(asyncio.Protocol):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._body: list[bytes] = []
        self.chunk = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._engine.streams.pop(self, None)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:  # sglang-router looks first whether it is gRPC that is spoken here
            self.transport.write(_NO_HTTP)
            self.transport.close()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_message_complete(self) -> None:
        raw = b"".join(self._body)
        self._body.clear()
        path, self._url = self._url.partition(b"?")[0], b""
        method = self._parser.get_method()
        engine = self._engine
        if path == CALLS_PATH:
            counts = {name.decode(): count for name, count in engine.calls.items()}
            self.transport.write(response(200, msgspec.json.encode(counts)))
            return
        engine.calls[b"%b %b" % (method, path)] += 1
        if path in _CHUNKS and method == b"POST":
            self._complete(path, raw)
        else:
            self.transport.write(
                answer(method, path, raw, scale_out=engine.scale_out, num_running=len(engine.streams))
            )

    def _complete(self, path: bytes, raw: bytes) -> None:
        try:
            body = _DECODER.decode(raw)
        except msgspec.DecodeError as reason:
            self.transport.write(error(400, "Bad Request", str(reason), "body"))
            return
        if not body.stream:
            self.transport.write(_WHOLE_ANSWERS[path])
            return
        self.transport.write(_STREAM_HEAD)
        self.chunk = _CHUNKS[path]
        self._engine.streams[self] = body.num_tokens
        if self._engine.at_once and body.num_tokens > 1:
            self._engine.streams[self] -= 1
            self.transport.write(self.chunk)


async def serve(port: int, step_s: float, engine: Engine) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: EngineConnection(engine), "127.0.0.1", port, backlog=2048)
    print(server.sockets[0].getsockname()[1], flush=True)
    while True:
        await asyncio.sleep(step_s)
        engine.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument(
        "--at-once",
        action="store_true",
        help="the first token of a stream right after its head, not at a step",
    )
    parser.add_argument(
        "--scale-out",
        action="store_true",
        help="answer .../render, as vLLM does with --enable-scale-out (0.28 without)",
    )
    args = parser.parse_args()
    uvloop.run(serve(args.port, args.step_ms / 1e3, Engine(at_once=args.at_once, scale_out=args.scale_out)))


if __name__ == "__main__":
    main()
