"""Asks a router, and notes when each token came."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import aiohttp
import msgspec
from demo_lib.processes import DemoError
from demo_lib.workload import GREEDY, STREAM

from policiesbench.figures import Sample
from policiesbench.workload import Prompt

_TIMEOUT_S = 600.0


async def ask_all(
    url: str, asked: Sequence[Prompt], max_tokens: int, progress: Callable[[], object]
) -> list[Sample]:
    """Each at its time, whoever is still waiting. DemoError for anything but a complete answer."""
    loop = asyncio.get_running_loop()
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        began = loop.time()

        async def one(prompt: Prompt) -> Sample:
            await asyncio.sleep(began + prompt.at_s - loop.time())
            try:
                sample = await ask(session, url, prompt.text, max_tokens)
            except (aiohttp.ClientError, asyncio.TimeoutError, msgspec.DecodeError) as error:
                raise DemoError(f"{url}: {error!r}") from error
            progress()
            return sample

        return await asyncio.gather(*(one(prompt) for prompt in asked))


async def ask(session: aiohttp.ClientSession, url: str, text: str, max_tokens: int) -> Sample:
    """DemoError for an answer that is none or not as long as was asked."""
    clock = asyncio.get_running_loop().time
    body = {**GREEDY, **STREAM, "prompt": text, "max_tokens": max_tokens, "ignore_eos": True}
    sent_at, came_at, prompt_tokens = clock(), list[float](), 0
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise DemoError(f"{url} answered {response.status}: {(await response.read())[:500]!r}")
        async for event in _events(response):
            now = clock()
            if "error" in event:
                raise DemoError(f"the stream ended with an error: {event['error']}")
            for choice in event["choices"]:
                # Tokens that come together have no time between them.
                came_at += [now] * len(choice.get("token_ids") or ())
            if event.get("usage"):
                prompt_tokens = event["usage"]["prompt_tokens"]
    if len(came_at) != max_tokens:
        raise DemoError(f"{url} answered {len(came_at)} tokens of {max_tokens}")
    gaps_ms = [(after - before) * 1e3 for before, after in itertools.pairwise(came_at)]
    return Sample((came_at[0] - sent_at) * 1e3, prompt_tokens, gaps_ms)


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in response.content:
        if line.startswith(b"data: "):
            data = line[len(b"data: ") :].strip()
            if data == b"[DONE]":
                return
            yield msgspec.json.decode(data, type=dict[str, Any])
    raise DemoError("the stream ended without [DONE]")
