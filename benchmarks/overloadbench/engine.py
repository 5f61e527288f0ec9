"""Stand-in prefill and decode engines that take as long as the engine they were calibrated to.

A prefill engine computes one prompt after the other, a decode engine gives every running stream one token a
step; how long a prompt and a step take comes from `PrefillModel` and `DecodeModel`, as `mooncake-router
profile` measures them. They speak what vLLM with NixlConnector speaks, by token ids, and count what they did.
With `Setup.block_size_tokens` a prefill engine remembers the full blocks of every prompt it computed. A block
goes by its first token there: prompts have to be such that this names the block and all before it, as those
made from a trace are.

One process holds all of a cluster: `python -m overloadbench.engine SETUP.json` prints the ports as JSON,
prefill engines first, and serves until it is ended.
"""

import asyncio
import sys
from pathlib import Path
from typing import Any

import httptools
import msgspec
import uvloop

from overloadbench.plan import Setup

OUTPUT_FIELD = "stand_in_output_tokens"
PREFILLS_TOTAL, DECODES_TOTAL = "stand_in_prefills_total", "stand_in_decodes_total"
PROMPT_TOKENS_TOTAL, CACHED_TOKENS_TOTAL = "stand_in_prompt_tokens_total", "stand_in_cached_tokens_total"
_PARAMS = {"do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "stand-in"}
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
_EVENT = b'data: {"object":"text_completion","choices":[{"index":0,"text":" a","finish_reason":null}]}\n\n'
_CHUNK = b"%x\r\n%b\r\n" % (len(_EVENT), _EVENT)
_LAST_EVENTS = (
    b'data: {"object":"text_completion","choices":[{"index":0,"text":" a","finish_reason":"length"}],'
    b'"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}}\n\ndata: [DONE]\n\n'
)


class Body(msgspec.Struct):
    prompt: list[int]
    stand_in_output_tokens: int = 1
    kv_transfer_params: dict[str, Any] | None = None


class Stream(msgspec.Struct):
    prompt_tokens: int
    output_tokens: int
    produced: int = 0


class Engine:
    """What it has to do and when that is done; answers go to connections. On the loop's thread."""

    def __init__(self, setup: Setup) -> None:
        self._models = setup.models
        self._block_size = setup.block_size_tokens
        self._event_tokens = setup.event_tokens
        self._loop = asyncio.get_running_loop()
        self._prefill_free_at = 0.0
        self._next_step_at = 0.0
        self._stepping: asyncio.TimerHandle | None = None
        self.streams: dict[Connection, Stream] = {}
        self._blocks: set[int] = set()
        self._kv_tokens = 0
        self.waiting = self.prefills = self.decodes = self.prompt_tokens = self.cached_tokens = 0

    def prefill(self, connection: "Connection", body: Body) -> None:
        # What is before it in the queue will be remembered by then, so the hit is known already.
        cached_tokens = self.remember(body.prompt) if self._block_size else 0
        compute_s = self._models.prefill.compute_ms(len(body.prompt), cached_tokens) / 1e3
        self._prefill_free_at = max(self._prefill_free_at, self._loop.time()) + compute_s
        self.waiting += 1
        self._loop.call_at(
            self._prefill_free_at, self._prefilled, connection, len(body.prompt), cached_tokens
        )

    def remember(self, prompt: list[int]) -> int:
        """Tokens of the prompt that need not be computed; the last one always is."""
        names = prompt[: len(prompt) // self._block_size * self._block_size : self._block_size]
        held = next((at for at, name in enumerate(names) if name not in self._blocks), len(names))
        self._blocks.update(names[held:])
        return min(held * self._block_size, len(prompt) - 1)

    def _prefilled(self, connection: "Connection", prompt_tokens: int, cached_tokens: int) -> None:
        self.waiting -= 1
        self.prefills += 1
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": 1,
            "total_tokens": prompt_tokens + 1,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        }
        choices = [{"index": 0, "text": " a", "finish_reason": "length"}]
        connection.answer(200, {"choices": choices, "usage": usage, "kv_transfer_params": _PARAMS})

    def decode(self, connection: "Connection", body: Body) -> None:
        self.decodes += 1
        connection.transport.write(_STREAM_HEAD)
        self.streams[connection] = Stream(len(body.prompt), body.stand_in_output_tokens)
        self._kv_tokens += len(body.prompt)
        if self._stepping is None:
            self._next_step_at = self._loop.time()
            self._plan_step()

    def leave(self, connection: "Connection") -> None:
        """Its stream is over, or its client has gone."""
        stream = self.streams.pop(connection, None)
        if stream is not None:
            self._kv_tokens -= stream.prompt_tokens + stream.produced

    def _plan_step(self) -> None:
        # From when the last step should have ended: a machine that is late catches up.
        step_ms = self._models.decode.tbt_ms(len(self.streams), self._kv_tokens)
        self._next_step_at += step_ms / 1e3
        self._stepping = self._loop.call_at(self._next_step_at, self._step)

    def _step(self) -> None:
        self._kv_tokens += len(self.streams)
        for connection, stream in list(self.streams.items()):
            stream.produced += 1
            if stream.produced >= stream.output_tokens:
                connection.transport.write(_last_chunks(stream))
                self.leave(connection)
            elif stream.produced == 1 or not stream.produced % self._event_tokens:
                connection.transport.write(_CHUNK)
        self._stepping = None
        if self.streams:
            self._plan_step()

    def metrics(self) -> str:
        figures = {
            "vllm:num_requests_running": len(self.streams),
            "vllm:num_requests_waiting": self.waiting,
            PREFILLS_TOTAL: self.prefills,
            DECODES_TOTAL: self.decodes,
            PROMPT_TOKENS_TOTAL: self.prompt_tokens,
            CACHED_TOKENS_TOTAL: self.cached_tokens,
        }
        return "".join(f'{name}{{engine="0"}} {value}\n' for name, value in figures.items())


def _last_chunks(stream: Stream) -> bytes:
    total = stream.prompt_tokens + stream.produced
    events = _LAST_EVENTS % (stream.prompt_tokens, stream.produced, total)
    return b"%x\r\n%b\r\n0\r\n\r\n" % (len(events), events)


class Connection(asyncio.Protocol):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._raw: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._engine.leave(self)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._url = b""
        self._raw.clear()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, data: bytes) -> None:
        self._raw.append(data)

    def on_message_complete(self) -> None:
        if self._url == b"/metrics":
            self._send(200, b"text/plain", self._engine.metrics().encode())
        elif self._url != b"/v1/completions":
            self.answer(200, {})
        else:
            body = msgspec.json.decode(b"".join(self._raw), type=Body)
            params = body.kv_transfer_params or {}
            if params.get("do_remote_decode"):
                self._engine.prefill(self, body)
            elif params.get("do_remote_prefill"):
                self._engine.decode(self, body)
            else:
                self.answer(400, {"error": "this engine decodes only what another one has prefilled"})

    def answer(self, status: int, document: dict[str, Any]) -> None:
        self._send(status, b"application/json", msgspec.json.encode(document))

    def _send(self, status: int, content_type: bytes, content: bytes) -> None:
        head = b"HTTP/1.1 %d X\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n"
        self.transport.write(head % (status, content_type, len(content)) + content)


async def _serve(setup: Setup) -> None:
    loop = asyncio.get_running_loop()
    ports = []
    for _ in range(setup.num_prefill + setup.num_decode):
        engine = Engine(setup)
        server = await loop.create_server(lambda engine=engine: Connection(engine), "127.0.0.1", 0)  # type: ignore[misc]
        ports.append(server.sockets[0].getsockname()[1])
    print(msgspec.json.encode(ports).decode(), flush=True)
    await asyncio.Event().wait()


def main() -> None:
    uvloop.run(_serve(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Setup)))


if __name__ == "__main__":
    main()
