"""Output lengths to expect, learned from those that were.

Prompts of one tenant and one size tend to be of one kind (chat turns, summaries, code completion). For each
kind a decaying histogram of output lengths is kept; a kind seen too rarely falls back to its tenant, then to
everybody.
"""

from __future__ import annotations

import math
from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

BUCKETS_PER_OCTAVE = 2
NUM_BUCKETS = 20 * BUCKETS_PER_OCTAVE  # up to a million tokens
MAX_KINDS = 4096
ENOUGH_SAMPLES = 16.0
DECAY = 1 - 1 / 512


class _Histogram:
    __slots__ = ("lengths", "total", "weights")

    def __init__(self) -> None:
        self.weights = [0.0] * NUM_BUCKETS
        self.lengths = [0.0] * NUM_BUCKETS  # weighted sum of the lengths in each bucket
        self.total = 0.0

    def add(self, tokens: int) -> None:
        # Old samples fade relative to new ones because new ones weigh more.
        bucket = bucket_of(tokens)
        self.total = self.total * DECAY + 1.0
        for sums, value in ((self.weights, 1.0), (self.lengths, float(tokens))):
            for index, before in enumerate(sums):
                if before:
                    sums[index] = before * DECAY
            sums[bucket] += value

    def mean(self, max_tokens: int) -> float:
        expected = 0.0
        for weight, length in zip(self.weights, self.lengths, strict=True):
            if weight:
                expected += min(length, weight * max_tokens) if max_tokens else length
        return expected / self.total


class LengthHistory:
    """`unknown_tokens` is expected until anything has been seen."""

    def __init__(self, unknown_tokens: int) -> None:
        self._unknown_tokens = unknown_tokens
        self._everybody = _Histogram()
        self._kinds: OrderedDict[tuple[str, int], _Histogram] = OrderedDict()
        self._remaining: NDArray[np.float64] | None = None

    @property
    def num_kinds(self) -> int:
        return len(self._kinds)

    def observe(self, tenant: str, prompt_tokens: int, output_tokens: int) -> None:
        if output_tokens < 1:
            return
        self._everybody.add(output_tokens)
        for kind in ((tenant, -1), (tenant, prompt_tokens.bit_length())):
            histogram = self._kinds.setdefault(kind, _Histogram())
            self._kinds.move_to_end(kind)
            histogram.add(output_tokens)
        while len(self._kinds) > MAX_KINDS:
            self._kinds.popitem(last=False)
        self._remaining = None

    def expected_tokens(self, tenant: str, prompt_tokens: int, max_tokens: int) -> float:
        """Mean output length of such a request; `max_tokens` 0: unlimited."""
        for kind in ((tenant, prompt_tokens.bit_length()), (tenant, -1)):
            histogram = self._kinds.get(kind)
            if histogram is not None and histogram.total >= ENOUGH_SAMPLES:
                return histogram.mean(max_tokens)
        if self._everybody.total:
            return self._everybody.mean(max_tokens)
        return float(min(self._unknown_tokens, max_tokens) if max_tokens else self._unknown_tokens)

    def remaining_tokens(self) -> NDArray[np.float64]:
        """[NUM_BUCKETS]: mean tokens still to come of a request that has produced bucket_of(x) tokens."""
        if self._remaining is None:
            weights = np.array(self._everybody.weights)
            lengths = np.array(self._everybody.lengths)
            longer = np.append(np.cumsum(weights[::-1])[::-1][1:], 0.0)
            longer_lengths = np.append(np.cumsum(lengths[::-1])[::-1][1:], 0.0)
            at = bucket_floor(np.arange(1, NUM_BUCKETS + 1))
            with np.errstate(divide="ignore", invalid="ignore"):
                remaining = np.where(longer > 0, longer_lengths / longer - at, 0.0)
            # Longer than anything seen: as much again as half of what it has produced.
            self._remaining = np.where(longer > 0, np.maximum(remaining, 1.0), at / 2)
        return self._remaining


def bucket_of(tokens: int) -> int:
    return min(int(math.log2(max(tokens, 1)) * BUCKETS_PER_OCTAVE), NUM_BUCKETS - 1)


def bucket_floor(bucket: NDArray[np.int64]) -> NDArray[np.float64]:
    floor: NDArray[np.float64] = np.exp2(bucket / BUCKETS_PER_OCTAVE)
    return floor
