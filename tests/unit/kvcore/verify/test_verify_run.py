"""The order of questions, with an engine that is a few lines of Python."""

import msgspec
import pytest

from kvcore.verify.engine import Engine, HttpJson, VerifyError
from kvcore.verify.report import to_json
from kvcore.verify.run import FLUSH_TRIES, Report, Settings, salted_prompt, verify
from kvcore.verify.verdict import Answer


class ScriptedEngine(Engine):
    """`hits`: tokens from the store, of each answer in turn. `events` is what was asked of it."""

    def __init__(self, hits: list[int], flushes: list[bool] | None = None, tokens_a_word: int = 2) -> None:
        super().__init__(HttpJson("http://127.0.0.1:1", "", 1.0))
        self.hints = {"own_cache": ["look at the flush"]}  # type: ignore[misc]
        self.hits, self.flushes = list(hits), list(flushes or [])
        self.events: list[str] = []
        self.prompts: set[str] = set()
        self.tokens_a_word = tokens_a_word

    def describe(self) -> str:
        return "scripted"

    def model(self) -> str:
        return "m"

    def count_tokens(self, text: str) -> int | None:
        return len(text.split()) * self.tokens_a_word

    def ask_greedy(self, prompt: str, max_tokens: int) -> Answer:
        self.events.append("ask")
        self.prompts.add(prompt)
        tokens: list[int | str] = list(range(max_tokens))
        return Answer(
            tokens=tokens,
            logprobs=[-0.5] * max_tokens,
            prompt_tokens=1000,
            cached_tokens=992,
            store_tokens=self.hits.pop(0),
            seconds=0.0,
        )

    def flush(self) -> bool:
        self.events.append("flush")
        return self.flushes.pop(0) if self.flushes else True


def run(first: ScriptedEngine, second: ScriptedEngine | None = None) -> tuple[str, list[float]]:
    slept: list[float] = []
    report = verify(first, second, Settings(), "salt", slept.append, lambda line: None)
    return report.verdict.code, slept


def test_asks_twice_flushes_and_asks_again() -> None:
    engine = ScriptedEngine([0, 992, 992])
    assert run(engine) == ("passed", [2.0])
    assert engine.events == ["ask", "ask", "flush", "ask"]
    [prompt] = engine.prompts
    assert prompt.startswith("salt")


def test_a_miss_is_asked_again_with_more_time_to_save() -> None:
    engine = ScriptedEngine([0, 992, 0, 992])
    assert run(engine) == ("passed", [2.0, 4.0])
    assert engine.events == ["ask", "ask", "flush", "ask", "flush", "ask"]


def test_misses_come_to_an_end_and_say_what_to_look_at() -> None:
    engine = ScriptedEngine([0, 992, 0, 0, 0])
    report = verify(engine, None, Settings(), "salt", lambda seconds: None, lambda line: None)
    assert (report.verdict.code, report.tries, report.hints) == ("own_cache", 3, ["look at the flush"])


def test_a_second_engine_is_asked_once_and_nobody_flushed() -> None:
    first, second = ScriptedEngine([0, 992]), ScriptedEngine([992])
    assert run(first, second) == ("passed", [2.0])
    assert (first.events, second.events) == (["ask", "ask"], ["ask"])
    assert first.prompts == second.prompts


def test_a_busy_engine_is_waited_for_and_given_up() -> None:
    engine = ScriptedEngine([0, 992, 992], flushes=[False, False, True])
    assert run(engine) == ("passed", [2.0, 1.0, 1.0])
    with pytest.raises(VerifyError, match="never was idle") as error:
        run(ScriptedEngine([0, 992], flushes=[False] * FLUSH_TRIES))
    assert "--second-url" in error.value.advice


@pytest.mark.parametrize("tokens_a_word", [1, 5])
def test_prompts_are_as_long_as_asked_for_by_the_engines_own_count(tokens_a_word: int) -> None:
    engine = ScriptedEngine([], tokens_a_word=tokens_a_word)
    counted = engine.count_tokens(salted_prompt(engine, "salt", 1000))
    assert counted is not None
    assert 900 < counted < 1100


def test_reports_go_through_json_unchanged() -> None:
    report = verify(
        ScriptedEngine([0, 992, 992]), None, Settings(), "salt", lambda seconds: None, lambda line: None
    )
    assert msgspec.json.decode(to_json(report), type=Report) == report
