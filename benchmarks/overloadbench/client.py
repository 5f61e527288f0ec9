"""One client a request: when its tokens came, or why it was refused."""

import asyncio
import contextlib
import re

import msgspec
from msgspec.structs import replace

from overloadbench.engine import OUTPUT_FIELD
from overloadbench.plan import Request

_USAGE = re.compile(rb'"completion_tokens": ?(\d+)')


class _Error(msgspec.Struct):
    code: str = ""


class _Refusal(msgspec.Struct):
    error: _Error


class Answer(msgspec.Struct, frozen=True):
    """`tokens` of prompt and output together. `refused`: the router's reason. `failed`: anything that is
    neither a whole answer nor a refusal. `late_ms`: it was sent so much too late, since the machine had no
    time for its client."""

    at_s: float
    ttft_ms: float = 0.0
    tbt_ms: float = 0.0  # mean
    tokens: int = 0
    late_ms: float = 0.0
    refused: str = ""
    failed: str = ""

    def slower(self, factor: float) -> "Answer":
        """With all durations so many times as long."""
        return replace(
            self,
            ttft_ms=self.ttft_ms * factor,
            tbt_ms=self.tbt_ms * factor,
            late_ms=self.late_ms * factor,
        )

    def meets(self, ttft_slo_ms: float, tbt_slo_ms: float) -> bool:
        return self.ttft_ms <= ttft_slo_ms and self.tbt_ms <= tbt_slo_ms


def body_of(request: Request) -> bytes:
    return msgspec.json.encode(
        {
            "model": "stand-in",
            "prompt": list(request.prompt),
            "stream": True,
            OUTPUT_FIELD: request.output_tokens,
        }
    )


async def ask(port: int, request: Request, body: bytes, timeout_s: float) -> Answer:
    """`body`: `body_of(request)`, which takes a while for long prompts."""
    answer = Answer(request.at_s, tokens=len(request.prompt) + request.output_tokens)
    try:
        return await asyncio.wait_for(_ask(port, answer, request.output_tokens, body), timeout_s)
    except asyncio.TimeoutError:
        return replace(answer, failed=f"no end within {timeout_s:g} s")
    except (OSError, asyncio.IncompleteReadError) as error:
        return replace(answer, failed=f"connection: {error!r}")


async def _ask(port: int, answer: Answer, output_tokens: int, body: bytes) -> Answer:
    loop = asyncio.get_running_loop()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
    sent_at = loop.time()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body))
        answer_head = (await reader.readuntil(b"\r\n\r\n")).lower()
        status = int(answer_head.split(b" ", 2)[1])
        if status != 200:
            length = int(answer_head.partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0])
            return _refused(answer, status, await reader.readexactly(length))
        first_at = last_at = 0.0
        num_tokens = 0
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                last_at = loop.time()
                first_at = first_at or last_at
                if usage := _USAGE.search(line):
                    num_tokens = int(usage[1])
            elif line.startswith(b"data: [DONE]"):
                break
        if num_tokens != output_tokens:
            return replace(answer, failed=f"{num_tokens} tokens of {output_tokens}")
        tbt_ms = (last_at - first_at) * 1e3 / max(num_tokens - 1, 1)
        return replace(answer, ttft_ms=(first_at - sent_at) * 1e3, tbt_ms=tbt_ms)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def _refused(answer: Answer, status: int, content: bytes) -> Answer:
    if status == 429:
        with contextlib.suppress(msgspec.DecodeError):
            if code := msgspec.json.decode(content, type=_Refusal).error.code:
                return replace(answer, refused=code)
    return replace(answer, failed=f"status {status}: {content[:200]!r}")
