"""Questions about a few long documents, at random times: what is asked, and what came of it. Pure."""

import random
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

ASKED = (
    "Which people are named?",
    "What is said about the sea?",
    "Summarise it in one line.",
    "Who gives orders here, and to whom?",
    "How does it end?",
    "Which places are named?",
)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """`documents` of `document_bytes` each, every one asked `questions` times. `load`: arrivals, as a
    multiple of what the engines could compute without any cache."""

    documents: int = 6
    questions: int = 5
    document_bytes: int = 4800
    max_tokens: int = 4
    load: float = 1.2
    seed: int = 0


class Prompt(NamedTuple):
    at_s: float
    text: str


class Sample(NamedTuple):
    """One request as its client saw it."""

    ttft_ms: float
    prompt_tokens: int


class Turn(msgspec.Struct, kw_only=True):
    """One policy over one setup's engines, in one round. Rates are shares of all prompt tokens."""

    setup: str
    policy: str
    round: int
    requests: int
    mean_ttft_ms: float
    p90_ttft_ms: float
    hit_rate: float  # of the engines' own caches
    store_rate: float  # fetched from the store


def prompts(
    plan: Plan, texts: Sequence[str], round_number: int, rate_per_s: float, salt: str
) -> list[Prompt]:
    """In the order of arrival. Order and times depend on the round only, so they are the same for every
    policy; `salt` begins every document, so that nothing of another turn is of use."""
    rng = random.Random(f"{plan.seed}/{round_number}")
    source = " ".join(texts)
    room = max(len(source) - plan.document_bytes, 1)
    pairs = []
    for number in range(plan.documents):
        start = room * number // plan.documents
        document = source[start : start + plan.document_bytes]
        head = f"Document {salt}-{number}. "
        pairs += [f"{head}{document}\n\n{ASKED[turn % len(ASKED)]}" for turn in range(plan.questions)]
    rng.shuffle(pairs)
    at_s, found = 0.0, []
    for text in pairs:
        at_s += rng.expovariate(rate_per_s)
        found.append(Prompt(at_s, text))
    return found


def summed_up(
    setup: str,
    policy: str,
    round_number: int,
    samples: Sequence[Sample],
    cached_tokens: float,
    fetched_tokens: float,
) -> Turn:
    """`cached_tokens`, `fetched_tokens`: what the engines counted in this turn."""
    ttfts = sorted(sample.ttft_ms for sample in samples)
    total = max(sum(sample.prompt_tokens for sample in samples), 1)
    return Turn(
        setup=setup,
        policy=policy,
        round=round_number,
        requests=len(samples),
        mean_ttft_ms=sum(ttfts) / len(ttfts),
        p90_ttft_ms=ttfts[min(int(len(ttfts) * 0.9), len(ttfts) - 1)],
        hit_rate=cached_tokens / total,
        store_rate=fetched_tokens / total,
    )
