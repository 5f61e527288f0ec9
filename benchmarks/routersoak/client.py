"""Clients of a soak: one request each time, ended in one of a few known ways within a deadline."""

import asyncio
import contextlib
import enum
import json
import random
from collections import Counter

import msgspec

_COMPLETIONS = b"/v1/completions"


class Ending(str, enum.Enum):
    """How a request ended, as its client saw it."""

    ANSWERED = "answered"
    REFUSED = "refused with 4xx"
    FAILED = "failed with 5xx"
    BROKEN_OFF = "stream ended by an error event"
    CUT = "connection cut"
    LEFT = "left by the client"
    HUNG = "hung"


class Request(msgspec.Struct, frozen=True):
    """`leaves_after`: the client goes after so many reads; 0: it stays to the end."""

    method: bytes
    path: bytes
    body: bytes = b""
    headers: bytes = b""
    leaves_after: int = 0


def draw_request(rng: random.Random) -> Request:
    """Mostly streams; whole answers, long prompts, clients that leave, SLOs nobody can meet, and nonsense."""
    kind = rng.random()
    if kind < 0.03:
        return Request(b"GET", b"/v1/models")
    if kind < 0.05:
        return Request(b"POST", _COMPLETIONS, b'{"model": "mock", "prompt": ')
    # A few groups of prompts that begin alike, each with its own end.
    group = rng.randrange(12)
    size = rng.choice((64, 512, 4096, 32768))
    prompt = f"{group:04}" * (size // 4) + str(rng.random())
    body = {"model": "mock", "prompt": prompt, "max_tokens": rng.randint(2, 64), "stream": kind < 0.8}
    return Request(
        b"POST",
        _COMPLETIONS,
        json.dumps(body).encode(),
        b"x-slo-ttft-ms: 0.001\r\n" if rng.random() < 0.02 else b"",
        leaves_after=rng.randint(1, 8) if kind < 0.12 else 0,
    )


class Clients:
    """`num_connections` of them, together `requests_per_s`. `endings` counts what became of each request."""

    def __init__(self, port: int, *, num_connections: int, requests_per_s: float, deadline_s: float) -> None:
        self._port = port
        self._num_connections = num_connections
        self._mean_pause_s = num_connections / requests_per_s
        self._deadline_s = deadline_s
        self._stopping = asyncio.Event()
        self.endings: Counter[str] = Counter()

    async def run(self, seed: int) -> None:
        """Until `stop`; requests under way then are brought to their end."""
        rngs = [random.Random(f"{seed}/{number}") for number in range(self._num_connections)]
        await asyncio.gather(*(self._go_on(rng) for rng in rngs))

    def stop(self) -> None:
        self._stopping.set()

    async def _go_on(self, rng: random.Random) -> None:
        connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        while not self._stopping.is_set():
            with contextlib.suppress(asyncio.TimeoutError):
                pause_s = rng.expovariate(1 / self._mean_pause_s)
                await asyncio.wait_for(self._stopping.wait(), pause_s)
                break
            request, keeps = draw_request(rng), False
            try:
                if connection is None:
                    connection = await asyncio.open_connection("127.0.0.1", self._port)
                ending, keeps = await asyncio.wait_for(_ask(*connection, request), self._deadline_s)
            except asyncio.TimeoutError:
                ending = Ending.HUNG
            except (asyncio.IncompleteReadError, ConnectionError):
                ending = Ending.CUT
            self.endings[ending.value] += 1
            if not keeps and connection is not None:
                connection[1].transport.abort()
                connection = None
        if connection is not None:
            connection[1].close()


async def _ask(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: Request
) -> tuple[Ending, bool]:
    """The ending, and whether the connection can be used again."""
    writer.write(
        b"%b %b HTTP/1.1\r\nhost: soak\r\ncontent-type: application/json\r\n%bcontent-length: %d\r\n\r\n%b"
        % (request.method, request.path, request.headers, len(request.body), request.body)
    )
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if request.leaves_after == 1:
        return Ending.LEFT, False
    status = int(head.split(b" ", 2)[1])
    keeps = b"\r\nconnection: close" not in head
    if b"\r\ntransfer-encoding: chunked" in head:
        complete = await _read_chunks(reader, request.leaves_after)
        if complete is None:
            return Ending.LEFT, False
        if not complete:
            return Ending.BROKEN_OFF, False
    else:
        length = int(head.partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0])
        await reader.readexactly(length)
    if status >= 500:
        return Ending.FAILED, keeps
    return (Ending.REFUSED if status >= 400 else Ending.ANSWERED), keeps


async def _read_chunks(reader: asyncio.StreamReader, leaves_after: int) -> bool | None:
    """Whether the stream ended with [DONE]; None when the client left before."""
    last, num_read = b"", 1
    while True:
        size = int(await reader.readuntil(b"\r\n"), 16)
        chunk = await reader.readexactly(size + 2)
        if not size:
            return b"[DONE]" in last
        last, num_read = chunk, num_read + 1
        if num_read == leaves_after:
            return None
