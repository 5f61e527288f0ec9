"""One client a request: when its tokens came, or why it was refused."""

import asyncio
import contextlib

import msgspec

from overloadbench.engine import OUTPUT_FIELD
from overloadbench.plan import Request


class _Error(msgspec.Struct):
    code: str = ""


class _Refusal(msgspec.Struct):
    error: _Error


class Answer(msgspec.Struct, frozen=True):
    """`refused`: the router's reason. `failed`: anything that is neither a whole answer nor a refusal."""

    at_s: float
    ttft_ms: float = 0.0
    tbt_ms: float = 0.0  # mean
    refused: str = ""
    failed: str = ""

    def meets(self, ttft_slo_ms: float, tbt_slo_ms: float) -> bool:
        return self.ttft_ms <= ttft_slo_ms and self.tbt_ms <= tbt_slo_ms


async def ask(port: int, request: Request, timeout_s: float) -> Answer:
    try:
        return await asyncio.wait_for(_ask(port, request), timeout_s)
    except asyncio.TimeoutError:
        return Answer(request.at_s, failed=f"no end within {timeout_s:g} s")
    except (OSError, asyncio.IncompleteReadError) as error:
        return Answer(request.at_s, failed=f"connection: {error!r}")


async def _ask(port: int, request: Request) -> Answer:
    loop = asyncio.get_running_loop()
    body = msgspec.json.encode(
        {
            "model": "stand-in",
            "prompt": request.prompt,
            "stream": True,
            OUTPUT_FIELD: request.output_tokens,
        }
    )
    head = b"POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
    sent_at = loop.time()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body))
        answer_head = (await reader.readuntil(b"\r\n\r\n")).lower()
        status = int(answer_head.split(b" ", 2)[1])
        if status != 200:
            length = int(answer_head.partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0])
            return _refused(request.at_s, status, await reader.readexactly(length))
        first_at = last_at = 0.0
        num_tokens = 0
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                last_at = loop.time()
                first_at = first_at or last_at
                num_tokens += 1
            elif line.startswith(b"data: [DONE]"):
                break
        if num_tokens != request.output_tokens:
            return Answer(request.at_s, failed=f"{num_tokens} tokens of {request.output_tokens}")
        tbt_ms = (last_at - first_at) * 1e3 / max(num_tokens - 1, 1)
        return Answer(request.at_s, (first_at - sent_at) * 1e3, tbt_ms)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def _refused(at_s: float, status: int, content: bytes) -> Answer:
    if status == 429:
        with contextlib.suppress(msgspec.DecodeError):
            if code := msgspec.json.decode(content, type=_Refusal).error.code:
                return Answer(at_s, refused=code)
    return Answer(at_s, failed=f"status {status}: {content[:200]!r}")
