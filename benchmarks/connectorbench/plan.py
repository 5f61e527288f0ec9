"""What is asked in a round: prompts of equal length that no other round knows. Pure."""

from collections.abc import Collection, Sequence
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


class Phase(NamedTuple):
    """Systems that take turns within rounds, with plain vLLM. `is_split`: as prefill and decode engines."""

    systems: tuple[str, ...]
    is_split: bool


# At most two systems at a time, which are ten gigabytes of engines: ours and who moves bytes as they do.
PHASES = (
    Phase(("ours-tcp", "mooncake-store"), False),
    Phase(("ours-tcp", "nixl"), True),
    Phase(("ours-tcp", "mooncake"), True),
    Phase(("ours-shm", "lmcache"), False),
    Phase(("offloading",), False),
)


def phases(chosen: Collection[str]) -> list[Phase]:
    """Those of PHASES in which `chosen` have a part, with these alone; none that another one contains."""
    found: list[Phase] = []
    for phase in PHASES:
        left = Phase(tuple(name for name in phase.systems if name in chosen), phase.is_split)
        is_new = not any(_contains(other, left) for other in found)
        if left.systems and is_new:
            found = [other for other in found if not _contains(left, other)] + [left]
    return found


def _contains(phase: Phase, other: Phase) -> bool:
    return phase.is_split == other.is_split and set(phase.systems) >= set(other.systems)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """`rounds` of each phase. `settle_s`: what everybody gets to save a prompt, before it is asked again."""

    rounds: int = 5
    prompt_bytes: int = 6000
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
