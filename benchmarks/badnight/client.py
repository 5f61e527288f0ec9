"""Clients of a bad night: what became of each request, and whether its tokens are the right ones."""

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import msgspec
from routersoak.client import Ending

from badnight.questions import Question, body_of, draw_question

_COMPLETIONS = "/v1/completions"


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """`tokens`: what came, all of them when it was answered. Times are of the event loop."""

    whom: str
    question: Question
    began_s: float
    ended_s: float
    ending: Ending
    tokens: list[int]
    is_wrong: bool = False
    detail: str = ""


class _Answer(Exception):
    """Ends a request otherwise than with all of its tokens."""

    def __init__(self, ending: Ending, detail: str = "") -> None:
        super().__init__(detail)
        self.ending, self.detail = ending, detail


class Asker:
    """`truth`: the tokens of every prompt's answer, in the order of `prompts`."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        prompts: Sequence[list[int]],
        truth: Sequence[list[int]],
        model: str,
        deadline_s: float,
    ) -> None:
        self._session = session
        self._prompts = prompts
        self._truth = truth
        self._model = model
        self._deadline_s = deadline_s

    async def ask(self, whom: str, url: str, question: Question) -> Asked:
        loop = asyncio.get_running_loop()
        began_s, tokens, ending, detail = loop.time(), list[int](), Ending.ANSWERED, ""
        body = body_of(question, self._prompts[question.number], self._model)
        try:
            await asyncio.wait_for(
                self._read(f"{url}{_COMPLETIONS}", body, question, tokens), self._deadline_s
            )
        except _Answer as answer:
            ending, detail = answer.ending, answer.detail
        except asyncio.TimeoutError:
            ending = Ending.HUNG
        except (aiohttp.ClientError, OSError) as error:
            ending, detail = Ending.CUT, repr(error)
        truth = self._truth[question.number]
        # Of what was not answered to the end all that came must be right, too.
        is_wrong = tokens != truth[: len(tokens)] or (ending is Ending.ANSWERED and tokens != truth)
        return Asked(
            whom=whom,
            question=question,
            began_s=began_s,
            ended_s=loop.time(),
            ending=ending,
            tokens=tokens,
            is_wrong=is_wrong,
            detail=detail,
        )

    async def _read(self, url: str, body: dict[str, Any], question: Question, tokens: list[int]) -> None:
        """Fills `tokens`. A connection each, since a client that leaves closes it."""
        async with self._session.post(url, json=body, headers={"connection": "close"}) as response:
            if response.status != 200:
                ending = Ending.FAILED if response.status >= 500 else Ending.REFUSED
                raise _Answer(ending, f"{response.status} {(await response.read())[:300]!r}")
            if not question.streams:
                _take(msgspec.json.decode(await response.read()), tokens)
                return
            num_events = 0
            async for line in response.content:
                if not line.startswith(b"data: "):
                    continue
                data = line.removeprefix(b"data: ").strip()
                if data == b"[DONE]":
                    return
                _take(msgspec.json.decode(data), tokens)
                num_events += 1
                if num_events == question.leaves_after:
                    raise _Answer(Ending.LEFT)
            raise _Answer(Ending.BROKEN_OFF, "the stream ended without [DONE]")


def _take(event: dict[str, Any], tokens: list[int]) -> None:
    if "error" in event:
        raise _Answer(Ending.BROKEN_OFF, str(event["error"]))
    for choice in event["choices"]:
        tokens += choice.get("token_ids") or ()
        if choice.get("finish_reason") not in (None, "length"):
            raise _Answer(Ending.BROKEN_OFF, f"finish_reason {choice['finish_reason']}")


class Clients:
    """Many who ask the routers, one after the other, with pauses. `url_of` says where a router is now."""

    def __init__(
        self,
        asker: Asker,
        routers: Sequence[str],
        url_of: Callable[[str], str],
        num_prompts: int,
        num_clients: int,
        mean_pause_s: float,
    ) -> None:
        self.asked: list[Asked] = []
        self._asker = asker
        self._routers = routers
        self._url_of = url_of
        self._num_prompts = num_prompts
        self._num_clients = num_clients
        self._mean_pause_s = mean_pause_s
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Requests under way are brought to their end."""
        self._stopping.set()

    async def run(self, seed: int) -> None:
        rngs = [random.Random(f"{seed}/client {number}") for number in range(self._num_clients)]
        await asyncio.gather(*(self._go_on(rng) for rng in rngs))

    async def _go_on(self, rng: random.Random) -> None:
        while not self._stopping.is_set():
            router = rng.choice(self._routers)
            question = draw_question(rng, self._num_prompts)
            self.asked.append(await self._asker.ask(router, self._url_of(router), question))
            try:
                await asyncio.wait_for(self._stopping.wait(), rng.expovariate(1 / self._mean_pause_s))
            except asyncio.TimeoutError:
                continue
