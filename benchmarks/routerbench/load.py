"""The load generator: a closed loop on raw protocols, so that it takes little of the machine itself."""

import asyncio
import contextlib
import time
from typing import cast

import uvloop

from routerbench.cases import Case, bodies

# How much longer to wait for the first answer, on a machine that has other things to do.
_PATIENCE_S = 30.0


class Load:
    """Every connection sends its next request when the answer to the last is complete."""

    def __init__(self, case: Case, port: int) -> None:
        self._case = case
        self.port = port
        self._bodies = bodies(case)
        self.is_running = True
        self._has_answer = asyncio.Event()
        self.latencies_s: list[float] = []
        self.first_tokens_s: list[float] = []
        self.errors = 0

    def answered(self, latency_s: float, first_token_s: float) -> None:
        self.latencies_s.append(latency_s)
        self.first_tokens_s.append(first_token_s)
        self._has_answer.set()

    def next_request(self) -> bytes:
        return _request(self.port, next(self._bodies))

    def run(self, seconds: float) -> None:
        """On a loop of its own, until there was an answer at least. Raises OSError when nobody listens."""
        uvloop.run(self._run(seconds))

    async def _run(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        made = [
            await loop.create_connection(lambda: Client(self), "127.0.0.1", self.port)
            for _ in range(self._case.connections)
        ]
        await asyncio.sleep(seconds)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._has_answer.wait(), _PATIENCE_S)
        self.is_running = False
        for transport, _ in made:
            transport.abort()


class Client(asyncio.Protocol):
    def __init__(self, load: Load) -> None:
        self._load = load

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._load.is_running:
            self._load.errors += 1

    def _send(self) -> None:
        self._left = -1  # bytes of the body to come; unknown: it is chunked
        self._has_head = False
        self._first_at = 0.0
        self._sent_at = time.perf_counter()
        self._transport.write(self._load.next_request())

    def data_received(self, data: bytes) -> None:
        if not self._has_head:
            self._has_head = True
            end = data.index(b"\r\n\r\n") + 4  # all of them send their heads in one piece
            if not data.startswith(b"HTTP/1.1 200"):
                self._load.errors += 1
            head, data = data[:end].lower(), data[end:]
            _, found, length = head.partition(b"content-length: ")
            if found:
                self._left = int(length.partition(b"\r\n")[0])
        if data and not self._first_at:
            self._first_at = time.perf_counter()
        if self._left >= 0:
            self._left -= len(data)
        if self._left == 0 or (self._left < 0 and data.endswith(b"0\r\n\r\n")):
            self._complete()

    def _complete(self) -> None:
        load = self._load
        if load.is_running:
            load.answered(time.perf_counter() - self._sent_at, self._first_at - self._sent_at)
            self._send()


def _request(port: int, body: bytes) -> bytes:
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:%d\r\nuser-agent: bench\r\n"
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (port, len(body), body)
    )
