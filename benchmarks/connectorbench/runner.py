"""Rounds: every system is asked the same prompts, one after the other; who fails is left out and named."""

import subprocess
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack

from demo_lib.openai_client import Answer
from demo_lib.processes import DemoError
from storebench.processes import SystemFailed

from connectorbench.engines import Engine, Engines
from connectorbench.figures import PLAIN, Sample, reason
from connectorbench.plan import (
    BESIDE,
    CACHED,
    COLD,
    OTHER,
    OWN,
    SPLIT,
    STREAM,
    Phase,
    Plan,
    Prompts,
    phases,
    prompts,
    turns,
)

FAILURES = (DemoError, SystemFailed, subprocess.SubprocessError, OSError)
_BESIDE_AFTER_S = 0.1  # the stream has begun


class Runner:
    """`start` has the engines of a system run while it is entered; `logs_of` is what they and their servers
    have written; `tell` gets a line for whoever watches."""

    def __init__(
        self,
        plan: Plan,
        text: str,
        start: Callable[[str], AbstractContextManager[Engines]],
        logs_of: Callable[[str], str],
        tell: Callable[[str], None],
    ) -> None:
        self._plan, self._text = plan, text
        self._start_system, self._logs_of, self._tell = start, logs_of, tell
        self._stacks: dict[str, ExitStack] = {}
        self._running: dict[str, Engines] = {}
        self.samples: list[Sample] = []
        self.left_out: dict[str, str] = {}

    def run(self, chosen: Collection[str]) -> None:
        """One of FAILURES when plain vLLM does not work, since then there is nothing to compare with."""
        try:
            for number, phase in enumerate(phases(chosen)):
                self._phase(phase, number * self._plan.rounds)
        finally:
            for name in reversed(list(self._running)):
                self._end(name)

    def _phase(self, phase: Phase, first_round: int) -> None:
        """Engines that the phase before has used as well go on."""
        names = (PLAIN, *phase.systems)
        for name in set(self._running) - set(names):
            self._end(name)
        for name in names:
            if name not in self._running and name not in self.left_out:
                self._start(name)
        turn = self._split if phase.is_split else self._reuse
        for number in range(first_round, first_round + self._plan.rounds):
            running = [name for name in names if name in self._running]
            if running == [PLAIN]:
                return
            asked = prompts(self._plan, self._text, number)
            for name in turns(running, number):
                self._tell(f"round {number + 1}: {name}")
                try:
                    turn(name, number, asked)
                except FAILURES as error:
                    self._fail(name, error)

    def _start(self, name: str) -> None:
        self._tell(f"starting {name}")
        stack = ExitStack()
        try:
            engines = stack.enter_context(self._start_system(name))
            self._running[name], self._stacks[name] = engines, stack
            self._warm_up(engines)
        except FAILURES as error:
            stack.close()
            self._fail(name, error)

    def _warm_up(self, engines: Engines) -> None:
        """The first prompts of an engine, a connector or a router take longer than others."""
        for number in range(2):
            for engine in (engines.first, engines.second, engines.router):
                if engine:
                    engine.ask(
                        f"Warming up {number} {engine.url}. {self._text[:1500]}", self._plan.max_tokens
                    )

    def _fail(self, name: str, error: BaseException) -> None:
        if name == PLAIN:
            raise error
        self._end(name)
        self.left_out[name] = reason(str(error), self._logs_of(name))
        self._tell(f"{name} is left out: {self.left_out[name]}")

    def _end(self, name: str) -> None:
        self._running.pop(name, None)
        if stack := self._stacks.pop(name, None):
            stack.close()

    # ---- one turn

    def _reuse(self, name: str, number: int, asked: Prompts) -> None:
        engines, plan = self._running[name], self._plan
        first, second = engines.first, engines.second

        def take(figure: str, engine: Engine, prompt: str, text: str) -> None:
            before = engine.loaded_tokens()
            answer = engine.ask(text, plan.max_tokens)
            self._add(name, figure, number, prompt, answer, engine.loaded_tokens() - before)

        take(COLD, first, "document", asked.document)
        time.sleep(plan.settle_s)
        if second is None:
            take(CACHED, first, "document", asked.document)
        else:
            take(OTHER, second, "document", asked.document)
            first.reset()
            take(OWN, first, "document", asked.document)
        self._stream(name, number, asked, first)
        time.sleep(plan.settle_s)
        for engine in (first, second):
            if engine:
                engine.reset()

    def _stream(self, name: str, number: int, asked: Prompts, engine: Engine) -> None:
        with ThreadPoolExecutor(1) as thread:
            stream = thread.submit(engine.ask, asked.stream, self._plan.stream_tokens)
            time.sleep(_BESIDE_AFTER_S)
            beside = engine.ask(asked.beside, 1)
            told = stream.result()
        # Of the whole of it: a client that is late for the first token would find the others waiting.
        per_token_ms = told.total_ms / self._plan.stream_tokens
        self._add(name, BESIDE, number, "beside", beside, 0)
        self._add(name, STREAM, number, "stream", told, 0, per_token_ms)

    def _split(self, name: str, number: int, asked: Prompts) -> None:
        engines, plan = self._running[name], self._plan
        decode = engines.second or engines.first
        before = decode.loaded_tokens()
        answer = (engines.router or engines.first).ask(asked.split, plan.max_tokens)
        self._add(name, SPLIT, number, "split", answer, decode.loaded_tokens() - before)
        time.sleep(plan.settle_s)

    def _add(
        self,
        name: str,
        figure: str,
        number: int,
        prompt: str,
        answer: Answer,
        loaded_tokens: int,
        ms: float | None = None,
    ) -> None:
        assert answer.ttft_ms is not None
        sample = Sample(
            system=name,
            figure=figure,
            round=number,
            prompt=prompt,
            ms=answer.ttft_ms if ms is None else ms,
            prompt_tokens=answer.prompt_tokens,
            loaded_tokens=loaded_tokens,
            token_ids=answer.token_ids,
        )
        self.samples.append(sample)
