"""What is asked in a round: prompts of equal length that no other round knows. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

# Figures of a round. `cold`: nobody has the prompt. `other`: another engine has computed it. `own`: this one
# has, and has lost its cache since. `cached`: plain vLLM's own cache. `stream`: a stream's time per token
# while `beside` is computed and saved. `split`: through a router, by a prefill and a decode engine.
COLD, OTHER, OWN, CACHED, STREAM, BESIDE, SPLIT = (
    "cold",
    "other",
    "own",
    "cached",
    "stream",
    "beside",
    "split",
)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """`settle_s`: what everybody gets to save a prompt before it is asked for again."""

    rounds: int = 6
    prompt_bytes: int = 4000
    max_tokens: int = 8
    stream_tokens: int = 40
    settle_s: float = 1.0
    seed: int = 0


class Prompts(NamedTuple):
    """Of one round. All systems are asked the same: each has engines and a store of its own."""

    document: str
    stream: str
    beside: str
    split: str


def prompts(plan: Plan, text: str, round_number: int) -> Prompts:
    """Each begins with words of its own, so no two of them share a block."""

    def about(name: str, number: int) -> str:
        room = max(len(text) - plan.prompt_bytes, 1)
        start = (number * 997 + plan.seed * 131) % room
        return f"{name} {round_number:03} of {plan.seed:03}. {text[start : start + plan.prompt_bytes]}"

    first = 3 * round_number
    return Prompts(
        about("Document", first),
        f"Story {round_number:03} of {plan.seed:03}: once upon a time there was",
        about("Appendix", first + 1),
        about("Leaflet", first + 2),
    )


def turns(systems: Sequence[str], round_number: int) -> list[str]:
    """Who begins changes with the round."""
    first = round_number % len(systems)
    return [*systems[first:], *systems[:first]]
