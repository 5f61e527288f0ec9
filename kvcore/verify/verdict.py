"""What three answers to one prompt say about the store. Pure.

`cold` was computed. `warm` came after it, from the engine's own cache: a control, because an engine that has
a prefix computes the rest in another shape and may round differently. `restored` came after the engine had
lost its cache, or from another engine. If the store's bytes are right, `restored` is one of the other two.
"""

from typing import Literal

import msgspec

Outcome = Literal["passed", "failed", "undecided"]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """`tokens`: ids, or strings where the engine gives no ids; `logprobs`: of each. `cached_tokens`: how many
    of the prompt's tokens were not computed; `store_tokens`: how many of those did not come from the engine's
    own cache. None when the engine does not say."""

    tokens: list[int | str]
    logprobs: list[float]
    prompt_tokens: int
    cached_tokens: int | None
    store_tokens: int | None
    seconds: float


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """`min_hit_percent`: of the prompt's tokens. `logprob_tolerance`: how far a log probability may be off
    even if the engine repeats itself exactly."""

    min_hit_percent: float = 80.0
    logprob_tolerance: float = 0.02


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    outcome: Outcome
    code: str
    sentence: str
    hit_percent: float | None
    tokens_identical: bool
    logprob_difference: float | None
    noise: float | None


def judge(cold: Answer, warm: Answer, restored: Answer, limits: Limits) -> Verdict:
    """`logprob_difference` is to the nearer one of cold and warm, `noise` between those two; None where the
    tokens differ, since log probabilities after the first difference are of different texts."""
    differences = [_difference(restored, other) for other in (warm, cold)]
    found = [difference for difference in differences if difference is not None]
    difference = min(found) if found else None
    noise = _difference(cold, warm)
    hit = restored.store_tokens
    hit_percent = None if hit is None else 100.0 * hit / max(1, restored.prompt_tokens)
    outcome, code, sentence = _decide(restored, hit_percent, difference, noise, limits)
    return Verdict(
        outcome=outcome,
        code=code,
        sentence=sentence,
        hit_percent=hit_percent,
        tokens_identical=difference is not None,
        logprob_difference=difference,
        noise=noise,
    )


def _decide(
    restored: Answer,
    hit_percent: float | None,
    difference: float | None,
    noise: float | None,
    limits: Limits,
) -> tuple[Outcome, str, str]:
    hit, prompt_tokens = restored.store_tokens, restored.prompt_tokens
    if hit is None or hit_percent is None:
        return "undecided", "hit_unknown", "The engine does not say how many tokens it took from a cache."
    if hit == 0 and restored.cached_tokens:
        return (
            "undecided",
            "own_cache",
            f"{restored.cached_tokens} tokens came from the engine's own cache; it should have been empty.",
        )
    if hit == 0:
        return "failed", "no_hit", f"Nothing of the {prompt_tokens}-token prompt came from the store."
    came = f"{hit} of {prompt_tokens} prompt tokens came from the store"
    if difference is None and noise is None:
        return (
            "undecided",
            "engine_unstable",
            f"{came}, but the engine gives different tokens for one prompt even without the store.",
        )
    if difference is None:
        return (
            "failed",
            "wrong_tokens",
            f"{came}, and the engine then generated other tokens than it does without the store.",
        )
    allowed = max(limits.logprob_tolerance, noise or 0.0)
    if difference > allowed:
        return (
            "failed",
            "logprobs_differ",
            f"{came}; tokens are identical, but log probabilities are off by {difference:.4g}"
            f" (allowed: {allowed:.4g}).",
        )
    if hit_percent < limits.min_hit_percent:
        return (
            "failed",
            "partial_hit",
            f"Only {came} ({hit_percent:.0f} %, wanted {limits.min_hit_percent:.0f} %); what came is right.",
        )
    return "passed", "passed", f"{came}; tokens are identical, log probabilities within {difference:.4g}."


def _difference(one: Answer, other: Answer) -> float | None:
    """The largest difference of log probabilities; None when the tokens are not the same."""
    if one.tokens != other.tokens:
        return None
    return max((abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True)), default=0.0)
