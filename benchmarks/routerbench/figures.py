"""What one measurement gives, and what the measurements of several rounds come to. Pure."""

import statistics
from collections.abc import Sequence

import msgspec

from routerbench.cases import CASES, CHUNKS


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One system under one load for a few seconds. `cpu_us`: of the router's processes, for each request.
    `engine_calls`: by path, how many a request makes (calls.py); empty where that is not counted."""

    case: str
    system: str
    round: int
    requests: int
    errors: int
    seconds: float
    cpu_us: float
    p50_us: float
    p99_us: float
    first_token_p50_us: float
    engine_calls: dict[str, float] = {}


def figure_of(
    case: str,
    system: str,
    round_number: int,
    *,
    latencies_s: Sequence[float],
    first_tokens_s: Sequence[float],
    errors: int,
    seconds: float,
    cpu_s: float,
    engine_calls: dict[str, float] | None = None,
) -> Figure:
    ordered = sorted(latencies_s) or [0.0]
    return Figure(
        case=case,
        system=system,
        round=round_number,
        requests=len(latencies_s),
        errors=errors,
        seconds=seconds,
        cpu_us=cpu_s / max(len(latencies_s), 1) * 1e6,
        p50_us=statistics.median(ordered) * 1e6,
        p99_us=ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] * 1e6,
        first_token_p50_us=statistics.median(first_tokens_s or [0.0]) * 1e6,
        engine_calls=engine_calls or {},
    )


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Medians over the rounds."""

    case: str
    system: str
    requests_per_s: float
    cpu_us: float
    cpu_us_per_chunk: float  # 0 where nothing is streamed
    p50_us: float
    p99_us: float
    first_token_p50_us: float
    engine_calls: float  # a request; 0 where they are not counted
    errors: int


def summaries(figures: Sequence[Figure]) -> list[Summary]:
    """One for each system and case, in the order they were measured first."""
    groups: dict[tuple[str, str], list[Figure]] = {}
    for figure in figures:
        groups.setdefault((figure.case, figure.system), []).append(figure)
    return [_summary(case, system, group) for (case, system), group in groups.items()]


def _summary(case: str, system: str, group: Sequence[Figure]) -> Summary:
    cpu_us = statistics.median(figure.cpu_us for figure in group)
    return Summary(
        case=case,
        system=system,
        requests_per_s=statistics.median(figure.requests / figure.seconds for figure in group),
        cpu_us=cpu_us,
        cpu_us_per_chunk=cpu_us / CHUNKS if CASES[case].stream else 0.0,
        p50_us=statistics.median(figure.p50_us for figure in group),
        p99_us=statistics.median(figure.p99_us for figure in group),
        first_token_p50_us=statistics.median(figure.first_token_p50_us for figure in group),
        engine_calls=statistics.median(sum(figure.engine_calls.values()) for figure in group),
        errors=sum(figure.errors for figure in group),
    )
