"""What samples say: medians, ratios within a round, whether tokens are those of plain vLLM. Pure."""

import math
import re
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from policiesbench.figures import paired

from connectorbench.plan import CACHED, COLD, OTHER, OWN

PLAIN = "plain"
# Computing the prompt is what a reuse saves.
_REFERENCES = {OTHER: COLD, OWN: COLD, CACHED: COLD}
# vLLM puts names and times of its processes before what they say, and says last that an error is above.
_SAYS_WHY = re.compile(
    r"^(\(\w+ pid=\d+\) )?(?:ERROR .*?\] )?(\w*(?:Error|Exception): (?!.*root cause above).+)$"
)


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One answer. `ms`: to its first token; of a stream, per token. `loaded_tokens`: of the
    prompt, as the engine counted them."""

    system: str
    figure: str
    round: int
    prompt: str
    ms: float
    prompt_tokens: int
    loaded_tokens: int
    token_ids: list[int]


class Ratio(NamedTuple):
    """Geometric mean over rounds, with its 95 % interval."""

    mean: float
    low: float
    high: float
    rounds: int


class Identical(NamedTuple):
    answers: int
    same: int


def of(samples: Sequence[Sample], system: str, figure: str) -> list[Sample]:
    return [sample for sample in samples if (sample.system, sample.figure) == (system, figure)]


def median_ms(samples: Sequence[Sample], system: str, figure: str) -> float | None:
    found = of(samples, system, figure)
    return statistics.median(sample.ms for sample in found) if found else None


def ratio(samples: Sequence[Sample], system: str, figure: str, to: str, seed: int = 0) -> Ratio | None:
    """How many times as long `system` takes as `to`, compared within rounds; to plain vLLM where a prompt is
    reused: as plain vLLM takes to compute it."""
    wanted = _REFERENCES.get(figure, figure) if to == PLAIN else figure
    others = of(samples, to, wanted)
    rounds = {sample.round for sample in others}
    own = [sample for sample in of(samples, system, figure) if sample.round in rounds]
    if not own:
        return None
    difference = paired(own, others, lambda sample: math.log(sample.ms), seed)
    mean, low, high = (math.exp(value) for value in (difference.mean, difference.low, difference.high))
    return Ratio(mean, low, high, difference.rounds)


def loaded_share(samples: Sequence[Sample], system: str, figures: Sequence[str]) -> float | None:
    """None when nothing was asked."""
    found = [sample for figure in figures for sample in of(samples, system, figure)]
    asked = sum(sample.prompt_tokens for sample in found)
    return sum(sample.loaded_tokens for sample in found) / asked if asked else None


def identical(samples: Sequence[Sample], system: str) -> Identical:
    """Answers of a system, and how many have the tokens that plain vLLM gave to the same prompt."""
    truth = {}
    for sample in samples:
        if sample.system == PLAIN and sample.figure != CACHED:
            truth[sample.round, sample.prompt] = sample.token_ids
    own = [s for s in samples if s.system == system and (s.round, s.prompt) in truth]
    return Identical(len(own), sum(truth[s.round, s.prompt] == s.token_ids for s in own))


def reason(error: str, logs: str = "") -> str:
    """One line: the last of the logs that names an error, which is its root, or the beginning of `error`."""
    telling = [match[2] for line in logs.splitlines() if (match := _SAYS_WHY.match(line))]
    line = telling[-1] if telling else next(iter(error.strip().splitlines()), "no reason given")
    return line.strip()[:300]
