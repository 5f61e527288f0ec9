"""Every verdict, from the answers that lead to it."""

import msgspec
import pytest

from kvcore.verify.verdict import Answer, Limits, judge

LIMITS = Limits(min_hit_percent=80.0, logprob_tolerance=0.02)
COLD = Answer(
    tokens=[1, 2, 3],
    logprobs=[-1.0, -2.0, -3.0],
    prompt_tokens=1000,
    cached_tokens=0,
    store_tokens=0,
    seconds=1.0,
)
RESTORED = msgspec.structs.replace(COLD, cached_tokens=992, store_tokens=992)
OTHER = [1, 2, 4]


def changed(answer: Answer, **fields: object) -> Answer:
    return msgspec.structs.replace(answer, **fields)


def test_what_came_is_what_was_saved() -> None:
    verdict = judge(COLD, COLD, RESTORED, LIMITS)
    assert (verdict.outcome, verdict.code) == ("passed", "passed")
    assert (verdict.hit_percent, verdict.logprob_difference, verdict.noise) == (99.2, 0.0, 0.0)


@pytest.mark.parametrize(
    ("restored", "outcome", "code"),
    [
        (changed(RESTORED, store_tokens=None), "undecided", "hit_unknown"),
        (changed(COLD), "failed", "no_hit"),
        (changed(COLD, tokens=OTHER), "failed", "no_hit"),
        (changed(RESTORED, store_tokens=0), "undecided", "own_cache"),
        (changed(RESTORED, tokens=OTHER), "failed", "wrong_tokens"),
        (changed(RESTORED, tokens=OTHER, store_tokens=16), "failed", "wrong_tokens"),
        (changed(RESTORED, logprobs=[-1.0, -2.0, -3.1]), "failed", "logprobs_differ"),
        (changed(RESTORED, logprobs=[-1.0, -2.0, -3.01]), "passed", "passed"),
        (changed(RESTORED, store_tokens=799), "failed", "partial_hit"),
        (changed(RESTORED, store_tokens=800), "passed", "passed"),
    ],
)
def test_verdicts_of_an_engine_that_repeats_itself(restored: Answer, outcome: str, code: str) -> None:
    verdict = judge(COLD, COLD, restored, LIMITS)
    assert (verdict.outcome, verdict.code) == (outcome, code)


def test_an_engine_that_rounds_differently_with_a_cached_prefix_is_its_own_measure() -> None:
    warm = changed(COLD, tokens=OTHER, logprobs=[-1.0, -2.0, -2.9])
    assert judge(COLD, warm, changed(RESTORED, tokens=OTHER, logprobs=warm.logprobs), LIMITS).code == "passed"
    assert judge(COLD, warm, RESTORED, LIMITS).code == "passed"
    third = changed(RESTORED, tokens=[7, 8, 9])
    assert judge(COLD, warm, third, LIMITS).code == "engine_unstable"


def test_noise_of_the_engine_widens_the_tolerance_but_only_by_itself() -> None:
    noisy = changed(COLD, logprobs=[-1.0, -2.3, -3.0])
    assert judge(COLD, noisy, changed(RESTORED, logprobs=[-1.0, -1.8, -3.0]), LIMITS).code == "passed"
    assert (
        judge(COLD, noisy, changed(RESTORED, logprobs=[-1.0, -1.6, -3.0]), LIMITS).code == "logprobs_differ"
    )


def test_what_came_is_judged_before_how_much_of_it() -> None:
    assert judge(COLD, COLD, changed(RESTORED, store_tokens=16, logprobs=[0.0, 0.0, 0.0]), LIMITS).code == (
        "logprobs_differ"
    )
