"""Engines that do as they are told, a client that sees every byte, and the router between them."""

import asyncio
import functools
import json
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import uvloop

from router.app import Router
from router.config import RouterConfig
from router.discovery import StaticDiscovery

# Generous: the machine may be busy. No test passes or fails by how long something took.
DEADLINE_S = 50.0


def async_test(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Runs on uvloop, as the router does in production, and fails when a task outlives the test."""

    @functools.wraps(test)
    def run() -> None:
        async def checked() -> None:
            await asyncio.wait_for(test(), DEADLINE_S * 2)
            await until(lambda: len(asyncio.all_tasks()) == 1)

        runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        runner.run(checked())
        # Only after a success: uvloop would wait for what a failed test left open, and nobody saw it.
        runner.close()

    del run.__wrapped__  # type: ignore[attr-defined]
    return run


async def until(condition: Callable[[], bool]) -> None:
    deadline = asyncio.get_running_loop().time() + DEADLINE_S
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "it did not happen"
        await asyncio.sleep(0.005)


class Seen(msgspec.Struct):
    """One request as an engine received it."""

    method: str
    path: str
    headers: dict[str, str]
    raw_body: bytes

    @property
    def body(self) -> Any:
        return json.loads(self.raw_body)

    @property
    def transfer(self) -> dict[str, Any]:
        found = self.body["kv_transfer_params"]["mooncake_pd"]
        assert isinstance(found, dict)
        return found


class Turn:
    """One request in the hands of a behaviour."""

    def __init__(
        self, engine: "MockEngine", seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.engine = engine
        self.seen = seen
        self._reader = reader
        self._writer = writer

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def answer(self, status: int, value: Any, headers: str = "") -> None:
        body = json.dumps(value).encode()
        head = f"HTTP/1.1 {status} Whatever\r\ncontent-type: application/json\r\n{headers}"
        await self.send(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)

    async def begin_stream(self) -> None:
        await self.send(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )

    async def event(self, data: str) -> None:
        payload = f"data: {data}\n\n".encode()
        await self.send(b"%x\r\n%b\r\n" % (len(payload), payload))

    async def end_stream(self) -> None:
        await self.event("[DONE]")
        await self.send(b"0\r\n\r\n")

    async def gone(self) -> None:
        """Waits until the router closes this connection."""
        while await self._reader.read(65536):
            pass
        self.engine.num_abandoned += 1

    def cut(self) -> None:
        self._writer.transport.abort()

    def cut_gently(self) -> None:
        """Everything written still arrives, then the connection ends."""
        self._writer.close()


Behaviour = Callable[[Turn], Awaitable[None]]


async def well(turn: Turn) -> None:
    """The normal engine: one answer, or `max_tokens` events."""
    if turn.seen.path == "/health":
        await turn.send(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
    elif turn.seen.method == "POST" and turn.seen.body.get("stream"):
        await turn.begin_stream()
        for i in range(turn.seen.body.get("max_tokens", 4)):
            await turn.event(json.dumps({"choices": [{"text": f" t{i}"}]}))
        await turn.end_stream()
    else:
        await turn.answer(200, {"served_by": turn.engine.name, "choices": [{"text": "hello"}]})


def fails(status: int, headers: str = "") -> Behaviour:
    async def behave(turn: Turn) -> None:
        error = {"error": {"message": f"{turn.engine.name} says {status}", "type": "x", "code": status}}
        await turn.answer(status, error, headers)

    return behave


async def hangs(turn: Turn) -> None:
    await turn.gone()


async def dies(turn: Turn) -> None:
    turn.cut()


class MockEngine:
    """`script` holds what to do with the next requests but probes; when it is empty, `default`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.script: deque[Behaviour] = deque()
        self.default: Behaviour = well
        self.seen: list[Seen] = []
        self.num_abandoned = 0
        self.num_connections = 0
        self.healthy = True
        self.metrics = b""
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> "MockEngine":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def stop(self) -> None:
        """As a kill: nothing listens any more and every connection is cut."""
        assert self._server is not None
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        await until(lambda: not self._writers)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self._writers.add(writer)
        try:
            while True:
                seen = await read_request(reader)
                turn = Turn(self, seen, reader, writer)
                if seen.path == "/health":
                    await (well if self.healthy else fails(500))(turn)
                    continue
                if seen.path == "/metrics":
                    head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(self.metrics)}\r\n\r\n"
                    await turn.send(head.encode() + self.metrics)
                    continue
                self.seen.append(seen)
                await (self.script.popleft() if self.script else self.default)(turn)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()


async def read_request(reader: asyncio.StreamReader) -> Seen:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.strip().split("\r\n")
    method, path, _ = first.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return Seen(method, path, headers, await reader.readexactly(int(headers.get("content-length", 0))))


class Answer(msgspec.Struct):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[str]:
        return [line.removeprefix("data: ") for line in self.body.decode().split("\n\n") if line]


class Client:
    """One connection to the router."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, path: str, body: Any = None, headers: str = "", method: str = "") -> None:
        raw = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        method = method or ("GET" if body is None else "POST")
        head = f"{method} {path} HTTP/1.1\r\nhost: router\r\n{headers}content-length: {len(raw)}\r\n\r\n"
        self.writer.write(head.encode() + raw)
        await self.writer.drain()

    async def head(self) -> tuple[int, dict[str, str]]:
        text = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = text.strip().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        return int(first.split(" ")[1]), headers

    async def answer(self) -> Answer:
        """Raises IncompleteReadError when the connection ends before the message does."""
        status, headers = await self.head()
        if headers.get("transfer-encoding") == "chunked":
            body = b"".join([chunk async for chunk in self.chunks()])
        elif "content-length" in headers:
            body = await self.reader.readexactly(int(headers["content-length"]))
        else:
            body = await self.reader.read()
        return Answer(status, headers, body)

    async def chunks(self) -> AsyncIterator[bytes]:
        while True:
            size = int((await self.reader.readuntil(b"\r\n")).strip(), 16)
            chunk = await self.reader.readexactly(size + 2)
            if size == 0:
                return
            yield chunk[:-2]

    async def ask(self, path: str, body: Any = None, headers: str = "", method: str = "") -> Answer:
        await self.send(path, body, headers, method)
        return await asyncio.wait_for(self.answer(), DEADLINE_S)

    def close(self) -> None:
        self.writer.close()

    async def closed_by_router(self) -> bytes:
        """Waits for the end of the connection; what still came before it."""
        try:
            return await asyncio.wait_for(self.reader.read(), DEADLINE_S)
        except ConnectionError:
            return b""


class Setup:
    """A running router and its engines."""

    def __init__(self, router: Router, port: int, engines: dict[str, MockEngine]) -> None:
        self.router = router
        self.port = port
        self.engines = engines
        self.clients: list[Client] = []

    async def client(self) -> Client:
        client = Client(*await asyncio.open_connection("127.0.0.1", self.port))
        self.clients.append(client)
        return client

    async def ask(self, path: str, body: Any = None, headers: str = "", method: str = "") -> Answer:
        return await (await self.client()).ask(path, body, headers, method)

    @property
    def in_flight(self) -> int:
        return sum(instance.in_flight for instance in self.router.cluster.instances.values())


@asynccontextmanager
async def running(
    *,
    mixed: int = 0,
    prefill: int = 0,
    decode: int = 0,
    bootstrap_ports: tuple[int, ...] = (),
    **config: Any,
) -> AsyncIterator[Setup]:
    """Engines m0, m1, ... or p0, ..., d0, ... and a router in front. At the end every counter must be back at
    zero and everything closed."""
    groups = {"m": mixed, "p": prefill, "d": decode}
    engines = {f"{k}{i}": await MockEngine(f"{k}{i}").start() for k, n in groups.items() for i in range(n)}
    urls = {k: [engines[f"{k}{i}"].url for i in range(n)] for k, n in groups.items()}
    urls["p"][: len(bootstrap_ports)] = [
        f"{url} {port}" for url, port in zip(urls["p"], bootstrap_ports, strict=False)
    ]
    settings = msgspec.convert(
        {"port": 0, "worker_urls": urls["m"], "prefill": urls["p"], "decode": urls["d"], **config},
        RouterConfig,
    )
    router = Router(settings, StaticDiscovery(settings.instance_specs()))
    _, port = await router.start()
    setup = Setup(router, port, engines)
    try:
        yield setup
        for client in setup.clients:
            client.close()
        await until(lambda: setup.in_flight == 0 and router.metrics.active_requests == 0)
        await until(lambda: router.metrics.client_connections == 0)
    finally:
        await router.stop()
        for engine in engines.values():
            await engine.stop()
