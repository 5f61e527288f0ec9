"""Figures out of samples. Pure."""

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from storebench.plan import Cell


class PhaseResult(NamedTuple):
    """One system, one cell, one round. `window_s`: from the first client's start to the last one's end;
    `cpu_s`: of all client and server processes of the system."""

    latencies_ns: tuple[int, ...]
    window_s: float
    cpu_s: float
    failures: int
    wrong_bytes: int


class Figure(NamedTuple):
    """One row of the report. Percentiles are taken over the calls of all rounds, `p50_us` and rates are
    medians over rounds, so that one disturbed round does not show; `*_by_round` keep the pairs for ratios."""

    system: str
    op: str
    size_bytes: int
    num_keys: int
    num_clients: int
    calls: int
    failures: int
    wrong_bytes: int
    p10_us: float
    p50_us: float
    p99_us: float
    gb_per_s: float
    calls_per_s: float
    cpu_s_per_gb: float | None
    cpu_us_per_call: float
    p50_us_by_round: tuple[float, ...]
    gb_per_s_by_round: tuple[float, ...]


def percentile(sorted_values: Sequence[float], percent: float) -> float:
    """Nearest rank; `sorted_values` must not be empty."""
    return sorted_values[round(percent / 100 * (len(sorted_values) - 1))]


def summarise(system: str, cell: Cell, results: Sequence[PhaseResult]) -> Figure:
    """Figure of all rounds; `results` must hold at least one call."""
    results = [result for result in results if result.latencies_ns]
    latencies_us = sorted(ns / 1e3 for result in results for ns in result.latencies_ns)
    p50s_us = tuple(median(result.latencies_ns) / 1e3 for result in results)
    gb_per_s = tuple(cell.call_bytes * len(result.latencies_ns) / result.window_s / 1e9 for result in results)
    total_gb = cell.call_bytes * len(latencies_us) / 1e9
    cpu_s = sum(result.cpu_s for result in results)
    return Figure(
        system=system,
        op=cell.op,
        size_bytes=cell.size_bytes,
        num_keys=cell.num_keys,
        num_clients=cell.num_clients,
        calls=len(latencies_us),
        failures=sum(result.failures for result in results),
        wrong_bytes=sum(result.wrong_bytes for result in results),
        p10_us=percentile(latencies_us, 10),
        p50_us=median(p50s_us),
        p99_us=percentile(latencies_us, 99),
        gb_per_s=median(gb_per_s),
        calls_per_s=median(len(result.latencies_ns) / result.window_s for result in results),
        cpu_s_per_gb=cpu_s / total_gb if total_gb else None,
        cpu_us_per_call=cpu_s / len(latencies_us) * 1e6,
        p50_us_by_round=p50s_us,
        gb_per_s_by_round=gb_per_s,
    )


def speedup(ours: Figure, peer: Figure) -> float:
    """How many times faster ours is: by latency for one client, by aggregate rate for many.

    Median of the rounds' own ratios: both systems ran within seconds of each other in a round, so the
    machine's mood cancels out.
    """
    if ours.num_clients == 1:
        pairs = zip(peer.p50_us_by_round, ours.p50_us_by_round, strict=False)
    else:
        pairs = zip(ours.gb_per_s_by_round, peer.gb_per_s_by_round, strict=False)
    return median(numerator / denominator for numerator, denominator in pairs)
