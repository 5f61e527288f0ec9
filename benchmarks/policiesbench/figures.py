"""What came of the questions: turns, and two cells compared request by request. Pure."""

import statistics
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import msgspec
import numpy as np

_DRAWS = 10_000


class Sample(msgspec.Struct, frozen=True):
    """One request as its client saw it. `tbt_ms`: the time from each token to the next."""

    ttft_ms: float
    prompt_tokens: int
    tbt_ms: list[float]


class Turn(msgspec.Struct, kw_only=True):
    """One cell in one round, its requests in the order they were sent. Rates are shares of prompt tokens."""

    engines: str
    routed: str
    round: int
    samples: list[Sample]
    hit_rate: float  # of the engines' own caches
    store_rate: float  # fetched from the store

    @property
    def ttfts_ms(self) -> list[float]:
        return [sample.ttft_ms for sample in self.samples]

    @property
    def tbts_ms(self) -> list[float]:
        return [tbt_ms for sample in self.samples for tbt_ms in sample.tbt_ms]


class Difference(msgspec.Struct, frozen=True):
    """Of a figure of two cells, with its 95 % interval; of one round that is `mean` itself."""

    mean: float
    low: float
    high: float
    rounds: int
    rounds_above: int  # in how many of them it was greater than 0


def summed_up(
    engines: str,
    routed: str,
    round_number: int,
    samples: Sequence[Sample],
    cached_tokens: float,
    fetched_tokens: float,
) -> Turn:
    """`cached_tokens`, `fetched_tokens`: what the engines counted in this turn."""
    total = max(sum(sample.prompt_tokens for sample in samples), 1)
    return Turn(
        engines=engines,
        routed=routed,
        round=round_number,
        samples=list(samples),
        hit_rate=cached_tokens / total,
        store_rate=fetched_tokens / total,
    )


def quantile(values: Sequence[float], share: float) -> float:
    """0 when there are none."""
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)] if ordered else 0.0


def mean_ttft_ms(turn: Turn) -> float:
    return statistics.fmean(turn.ttfts_ms)


def tbt_quantile(share: float) -> Callable[[Turn], float]:
    return lambda turn: quantile(turn.tbts_ms, share)


class OfRound(Protocol):
    @property
    def round(self) -> int: ...


AnyTurn = TypeVar("AnyTurn", bound=OfRound)


def paired(
    slower: Sequence[AnyTurn], faster: Sequence[AnyTurn], figure: Callable[[AnyTurn], float], seed: int
) -> Difference:
    """`figure` of the one minus that of the other, round by round: both answered the same requests in it.

    Rounds are drawn again with replacement (a bootstrap), not requests: those of one round wait in one queue,
    so a slow one makes its neighbours slow and they are no independent evidence. Percentiles of few values
    are too narrow by sqrt((n - 1) / n), which is put right.
    """
    others = {turn.round: turn for turn in faster}
    differences = np.array([figure(turn) - figure(others[turn.round]) for turn in slower])
    mean, count = float(differences.mean()), len(differences)
    above = int((differences > 0).sum())
    if count < 2:
        return Difference(mean, mean, mean, count, above)
    drawn = np.random.default_rng(seed).integers(0, count, size=(_DRAWS, count))
    spread = (differences[drawn].mean(axis=1) - mean) * (count / (count - 1)) ** 0.5
    low, high = np.percentile(spread, (2.5, 97.5))
    return Difference(mean, mean + float(low), mean + float(high), count, above)
