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
GROWTH = 1 + 1 / 512  # how much more a sample weighs than the one before it
REFRESH_SAMPLES = 32


class _Histogram:
    """Old samples fade because newer ones weigh more: adding one touches one bucket."""

    __slots__ = ("end", "length", "lengths", "next_weight", "total", "weights")

    def __init__(self) -> None:
        self.weights = [0.0] * NUM_BUCKETS
        self.lengths = [0.0] * NUM_BUCKETS  # weighted sum of the lengths in each bucket
        self.total = self.length = 0.0  # their sums
        self.next_weight = 1.0
        self.end = 0  # no bucket from here on has ever been touched

    @property
    def num_samples(self) -> float:
        """In units of the newest one."""
        return self.total / self.next_weight

    def add(self, tokens: int, bucket: int) -> None:
        """`bucket`: bucket_of(tokens), which takes as long as the rest."""
        weight = self.next_weight
        if bucket >= self.end:
            self.end = bucket + 1
        self.weights[bucket] += weight
        self.lengths[bucket] += weight * tokens
        self.total += weight
        self.length += weight * tokens
        self.next_weight = weight * GROWTH
        if weight > 1e12:
            self._rescale()

    def mean(self, max_tokens: int) -> float:
        expected = self.length
        if max_tokens:
            for bucket in range(bucket_of(max_tokens), self.end):
                excess = self.lengths[bucket] - self.weights[bucket] * max_tokens
                if excess > 0:
                    expected -= excess
        return expected / self.total

    def _rescale(self) -> None:
        factor = 1 / self.next_weight
        self.weights = [weight * factor for weight in self.weights]
        self.lengths = [length * factor for length in self.lengths]
        self.total, self.length = sum(self.weights), sum(self.lengths)
        self.next_weight = 1.0


class LengthHistory:
    """`unknown_tokens` is expected until anything has been seen."""

    def __init__(self, unknown_tokens: int) -> None:
        self._unknown_tokens = unknown_tokens
        self._everybody = _Histogram()
        self._kinds: OrderedDict[tuple[str, int], _Histogram] = OrderedDict()
        self._remaining: NDArray[np.float64] | None = None
        self._unseen = 0  # samples since it was computed

    @property
    def num_kinds(self) -> int:
        return len(self._kinds)

    def observe(self, tenant: str, prompt_tokens: int, output_tokens: int) -> None:
        if output_tokens < 1:
            return
        bucket = bucket_of(output_tokens)
        self._everybody.add(output_tokens, bucket)
        for kind in ((tenant, -1), (tenant, prompt_tokens.bit_length())):
            histogram = self._kinds.get(kind)
            if histogram is None:
                histogram = self._kinds[kind] = _Histogram()
            else:
                self._kinds.move_to_end(kind)
            histogram.add(output_tokens, bucket)
        while len(self._kinds) > MAX_KINDS:
            self._kinds.popitem(last=False)
        self._unseen += 1

    def expected_tokens(self, tenant: str, prompt_tokens: int, max_tokens: int) -> float:
        """Mean output length of such a request; `max_tokens` 0: unlimited."""
        for kind in ((tenant, prompt_tokens.bit_length()), (tenant, -1)):
            histogram = self._kinds.get(kind)
            if histogram is not None and histogram.num_samples >= ENOUGH_SAMPLES:
                return histogram.mean(max_tokens)
        if self._everybody.total:
            return self._everybody.mean(max_tokens)
        return float(min(self._unknown_tokens, max_tokens) if max_tokens else self._unknown_tokens)

    def remaining_tokens(self) -> NDArray[np.float64]:
        """[NUM_BUCKETS]: mean tokens still to come of a request that has produced bucket_of(x) tokens.

        Some samples late: it is asked for at every arrival and moves slowly.
        """
        if self._remaining is None or self._unseen >= REFRESH_SAMPLES:
            self._unseen = 0
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
