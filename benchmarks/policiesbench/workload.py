"""Questions about a few long documents, at random times: what is asked of everybody. Pure."""

import random
from collections.abc import Sequence
from itertools import accumulate
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
    """`requests` a turn about `documents` of `document_bytes`, of which the k-th is asked about 1 / k^`skew`
    times as often as the first. An engine's own cache holds `cached_documents`. `load`: arrivals, as a
    multiple of what both engines could compute without any cache."""

    requests: int = 54
    documents: int = 9
    skew: float = 0.8
    document_bytes: int = 4800
    cached_documents: float = 3.0
    max_running: int = 2  # requests in an engine's batch
    max_tokens: int = 4
    load: float = 1.0
    seed: int = 0


class Prompt(NamedTuple):
    at_s: float
    text: str


def prompts(
    plan: Plan, texts: Sequence[str], round_number: int, rate_per_s: float, salt: str
) -> list[Prompt]:
    """In the order of arrival (Poisson). All but the salt depends on the round only, so it is the same for
    every cell; `salt` begins every document, so that nothing of another turn is of use."""
    rng = random.Random(f"{plan.seed}/{round_number}")
    source = " ".join(texts)
    room = max(len(source) - plan.document_bytes, 1)
    documents = []
    for number in range(plan.documents):
        start = room * number // plan.documents
        documents.append(f"Document {salt}-{number}. {source[start : start + plan.document_bytes]}")
    shares = list(accumulate(1 / rank**plan.skew for rank in range(1, plan.documents + 1)))
    at_s, found = 0.0, []
    for number in range(plan.requests):
        document = rng.choices(documents, cum_weights=shares)[0]
        # Numbered: the same question twice would be a prompt that is known to its end.
        question = f"{number}. {ASKED[number % len(ASKED)]}"
        at_s += rng.expovariate(rate_per_s)
        found.append(Prompt(at_s, f"{document}\n\n{question}"))
    return found
