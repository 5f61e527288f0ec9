"""Puts the question: one prompt nobody has sent before, three times, with a flush before the last."""

from collections.abc import Callable

import msgspec

from kvcore.verify.engine import Engine, VerifyError
from kvcore.verify.verdict import Answer, Limits, Verdict, judge

# Text, not random ids: a model's greedy choices on noise are near ties, which rounding decides.
SENTENCE = "Item {}: the store keeps what one engine has computed, and another engine takes it from there. "
TOKENS_A_SENTENCE = 22  # where the engine does not count them itself
FLUSH_TRIES = 30


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """`settle_s`: how long the engine gets to save before the first flush; twice as long before each further
    try."""

    prompt_tokens: int = 1000
    max_tokens: int = 16
    settle_s: float = 2.0
    tries: int = 3
    limits: Limits = Limits()


class Report(msgspec.Struct, frozen=True, kw_only=True):
    engine: str
    second_engine: str | None
    verdict: Verdict
    hints: list[str]
    tries: int
    cold: Answer
    warm: Answer
    restored: Answer


def verify(
    first: Engine,
    second: Engine | None,
    settings: Settings,
    salt: str,
    sleep: Callable[[float], None],
    say: Callable[[str], None],
) -> Report:
    """`second`: an engine that has not seen the prompt, asked instead of flushing the first. Raises
    VerifyError."""
    engine = first.describe()
    second_engine = second.describe() if second else None
    prompt = salted_prompt(first, salt, settings.prompt_tokens)
    say(f"{engine}: the first answer, computed")
    cold = first.answer(prompt, settings.max_tokens)
    say("the same again, from the engine's own cache")
    warm = first.answer(prompt, settings.max_tokens)
    if second:
        sleep(settings.settle_s)
        say(f"the same from {second_engine}, which has never seen it")
        restored, tries = second.answer(prompt, settings.max_tokens), 1
    else:
        restored, tries = _after_flush(first, prompt, settings, sleep, say)
    verdict = judge(cold, warm, restored, settings.limits)
    hints = [] if verdict.outcome == "passed" else (second or first).hints.get(verdict.code, [])
    return Report(
        engine=engine,
        second_engine=second_engine,
        verdict=verdict,
        hints=hints,
        tries=tries,
        cold=cold,
        warm=warm,
        restored=restored,
    )


def salted_prompt(engine: Engine, salt: str, wanted_tokens: int) -> str:
    """About `wanted_tokens` long. The salt comes first, so that no prefix of it can have been cached."""
    sample = "".join(SENTENCE.format(i) for i in range(20))
    counted = engine.count_tokens(sample)
    tokens_a_sentence = counted / 20 if counted else TOKENS_A_SENTENCE
    num_sentences = max(1, round(wanted_tokens / tokens_a_sentence))
    return f"{salt}. " + "".join(SENTENCE.format(i) for i in range(num_sentences))


def _after_flush(
    engine: Engine,
    prompt: str,
    settings: Settings,
    sleep: Callable[[float], None],
    say: Callable[[str], None],
) -> tuple[Answer, int]:
    """Saving goes on after an answer, and nobody outside can see its end; so a miss is asked again."""
    for attempt in range(1, settings.tries + 1):
        sleep(settings.settle_s * 2 ** (attempt - 1))
        _flush(engine, sleep)
        say("caches flushed; the same from the store" + (f" (try {attempt})" if attempt > 1 else ""))
        restored = engine.answer(prompt, settings.max_tokens)
        wanted = settings.limits.min_hit_percent / 100 * restored.prompt_tokens
        if restored.store_tokens is None or restored.store_tokens >= wanted:
            break
    return restored, attempt


def _flush(engine: Engine, sleep: Callable[[float], None]) -> None:
    for _ in range(FLUSH_TRIES):
        if engine.flush():
            return
        sleep(1.0)
    raise VerifyError(
        "the engine never was idle, and flushes its caches only then",
        "try when it has no requests, or name a second engine on the same store with --second-url",
    )
