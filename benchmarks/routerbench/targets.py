"""What we want to be true, as data, and whether it is. Pure; never asserted by tests.

A comparison is the median over rounds of what it is within one round: a machine that slows down does so for
all who take turns in that round.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence

import msgspec

from routerbench.cases import CHUNKS
from routerbench.figures import Figure
from routerbench.systems import DIRECT, FLOORS, VLLM_ROUTER_BY_PREFIX


class Target(msgspec.Struct, frozen=True):
    """`value`: of our figure and the other's in the same round; it should be at most `limit`."""

    what: str
    case: str
    other: str
    limit: float
    value: Callable[[Figure, Figure], float]
    unit: str = ""


class Verdict(msgspec.Struct, frozen=True):
    """`floors`: by the name of a relay that knows nothing of HTTP, what `value` would be were it ours."""

    what: str
    case: str
    other: str
    value: float
    limit: float
    unit: str
    floors: dict[str, float]

    @property
    def is_met(self) -> bool:
        return self.value <= self.limit

    @property
    def is_out_of_reach(self) -> bool:
        """Not even a relay meets it."""
        return any(floor > self.limit for floor in self.floors.values())


def _cpu_ratio(ours: Figure, other: Figure) -> float:
    return ours.cpu_us / max(other.cpu_us, 1e-9)


def _latency_ratio(ours: Figure, other: Figure) -> float:
    return ours.p50_us / max(other.p50_us, 1e-9)


TARGETS = (
    Target("CPU a request, as a share", "a32", "vllm-router rr", 1.0, _cpu_ratio),
    Target("CPU a request, as a share", "c4k", VLLM_ROUTER_BY_PREFIX, 0.15, _cpu_ratio),
    Target("CPU a request, as a share", "c32k", VLLM_ROUTER_BY_PREFIX, 0.15, _cpu_ratio),
    Target("CPU a chunk", "b128", DIRECT, 8.0, lambda ours, _: ours.cpu_us / CHUNKS, "us"),
    # Direct and router share a round, so equal added latency means equal latency.
    Target("p50 latency, as a share", "a1", "vllm-router rr", 1.0, _latency_ratio),
    Target(
        "first token later than direct",
        "b1",
        DIRECT,
        1000.0,
        lambda ours, direct: ours.first_token_p50_us - direct.first_token_p50_us,
        "us",
    ),
)


def judge(
    figures: Sequence[Figure],
    ours: str = "ours",
    targets: Sequence[Target] = TARGETS,
) -> Iterator[Verdict]:
    """One for each target of which both sides were measured in the same round."""
    found = {(figure.case, figure.system, figure.round): figure for figure in figures}
    rounds = sorted({figure.round for figure in figures})

    def compare(target: Target, system: str) -> float | None:
        pairs = [
            (found.get((target.case, system, number)), found.get((target.case, target.other, number)))
            for number in rounds
        ]
        values = [target.value(a, b) for a, b in pairs if a is not None and b is not None]
        return statistics.median(values) if values else None

    for target in targets:
        value = compare(target, ours)
        if value is not None:
            of_floors = {
                relay.name: floor for relay in FLOORS if (floor := compare(target, relay.name)) is not None
            }
            yield Verdict(target.what, target.case, target.other, value, target.limit, target.unit, of_floors)
