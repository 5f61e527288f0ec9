"""What the router's counters did over the last half hour: differences of snapshots. Pure; one thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

SAMPLE_INTERVAL_S = 2.0
KEPT_SAMPLES = 900  # half an hour
RECENT_S = 60.0


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the start, and gauges, at one moment. `at`: seconds of the router's clock; `failed` are
    answers of 500 and above, `rejected` and `refused` are by reason."""

    at: float
    unix_time_s: float
    finished: int = 0
    failed: int = 0
    rejected: Mapping[str, int] = {}
    ttft_counts: tuple[int, ...] = ()
    tbt_counts: tuple[int, ...] = ()
    prompt_tokens: int = 0
    hit_tokens: int = 0
    slo_answers: Mapping[tuple[str, str], int] = {}
    active_requests: int = 0
    queue_ms: float = 0.0
    engines_up: int = 0
    engines: int = 0


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What happened between two snapshots. None: nothing that could be said. Shares are 0 to 1."""

    seconds: float
    finished: int
    failed: int
    rejected: Mapping[str, int]
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None
    tbt_p50_ms: float | None
    tbt_p95_ms: float | None
    hit_share: float | None
    ttft_met_share: float | None
    tbt_met_share: float | None


class Bounds(msgspec.Struct, frozen=True):
    """Upper ends of the histograms' buckets, seconds."""

    ttft: tuple[float, ...]
    tbt: tuple[float, ...]


def between(old: Snapshot, new: Snapshot, bounds: Bounds) -> Figures:
    ttft = _difference(old.ttft_counts, new.ttft_counts)
    tbt = _difference(old.tbt_counts, new.tbt_counts)
    prompt_tokens = new.prompt_tokens - old.prompt_tokens
    rejected = {
        reason: count - old.rejected.get(reason, 0)
        for reason, count in new.rejected.items()
        if count > old.rejected.get(reason, 0)
    }
    return Figures(
        seconds=max(new.at - old.at, 1e-3),
        finished=new.finished - old.finished,
        failed=new.failed - old.failed,
        rejected=rejected,
        ttft_p50_ms=quantile_ms(bounds.ttft, ttft, 0.5),
        ttft_p95_ms=quantile_ms(bounds.ttft, ttft, 0.95),
        tbt_p50_ms=quantile_ms(bounds.tbt, tbt, 0.5),
        tbt_p95_ms=quantile_ms(bounds.tbt, tbt, 0.95),
        hit_share=(new.hit_tokens - old.hit_tokens) / prompt_tokens if prompt_tokens else None,
        ttft_met_share=_met_share(old, new, "ttft"),
        tbt_met_share=_met_share(old, new, "tbt"),
    )


def quantile_ms(bounds_s: Sequence[float], counts: Sequence[int], quantile: float) -> float | None:
    """As Prometheus' histogram_quantile: evenly spread within a bucket; beyond the last bound, that bound."""
    total = sum(counts)
    if not total:
        return None
    rank, below, lower = quantile * total, 0, 0.0
    for upper, count in zip(bounds_s, counts, strict=False):
        if count and below + count >= rank:
            return (lower + (upper - lower) * (rank - below) / count) * 1e3
        below += count
        lower = upper
    return bounds_s[-1] * 1e3


class History:
    """One row for each two snapshots in a row, the last KEPT_SAMPLES of them, numbered from 1."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._rows: deque[tuple[Snapshot, Figures]] = deque(maxlen=KEPT_SAMPLES)
        self._recent: deque[Snapshot] = deque()
        self.num_rows = 0

    def add(self, snapshot: Snapshot) -> None:
        recent = self._recent
        if recent:
            self.num_rows += 1
            # Of older snapshots only the gauges are shown: their counters need not be kept.
            gauges = msgspec.structs.replace(
                snapshot, ttft_counts=(), tbt_counts=(), rejected={}, slo_answers={}
            )
            self._rows.append((gauges, between(recent[-1], snapshot, self._bounds)))
        recent.append(snapshot)
        while len(recent) > 2 and recent[1].at <= snapshot.at - RECENT_S:
            recent.popleft()

    def recent(self) -> Figures | None:
        """The last RECENT_S as a whole; None before the second snapshot."""
        if len(self._recent) < 2:
            return None
        return between(self._recent[0], self._recent[-1], self._bounds)

    def columns_after(self, row_number: int) -> dict[str, list[Any]]:
        """Rows of higher numbers, one list a column. Rejections: one column for each reason among them."""
        num_new = min(max(self.num_rows - row_number, 0), len(self._rows))
        if row_number > self.num_rows:
            num_new = len(self._rows)  # the page has seen another run of the router
        rows = [self._rows[i] for i in range(len(self._rows) - num_new, len(self._rows))]
        columns: dict[str, list[Any]] = {
            name: [getattr(gauges, name) for gauges, _ in rows]
            for name in ("unix_time_s", "active_requests", "queue_ms", "engines_up")
        }
        columns["requests_per_s"] = [figures.finished / figures.seconds for _, figures in rows]
        columns["failed_per_s"] = [figures.failed / figures.seconds for _, figures in rows]
        for name in ("ttft_p50_ms", "ttft_p95_ms", "tbt_p50_ms", "tbt_p95_ms", "hit_share"):
            columns[name] = [getattr(figures, name) for _, figures in rows]
        for reason in sorted({reason for _, figures in rows for reason in figures.rejected}):
            columns[f"rejected:{reason}"] = [
                figures.rejected.get(reason, 0) / figures.seconds for _, figures in rows
            ]
        return columns


def _difference(old: Sequence[int], new: Sequence[int]) -> list[int]:
    return [n - o for o, n in zip(old, new, strict=True)] if old else list(new)


def _met_share(old: Snapshot, new: Snapshot, slo: str) -> float | None:
    met, missed = (
        new.slo_answers.get((slo, outcome), 0) - old.slo_answers.get((slo, outcome), 0)
        for outcome in ("met", "missed")
    )
    return met / (met + missed) if met + missed else None
