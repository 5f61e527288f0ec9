"""Time between tokens, kept for runs of steps instead of single ones.

All requests of a batch get a token a step, so the durations of steps are logged once for the node, as runs of
equal composition, and a request only remembers where it joined and left.
"""

from __future__ import annotations

from collections.abc import Sequence

TAIL_SHARE = 0.1


class StepLog:
    """Runs in order: how many steps, and how long each took on average (within a run they differ only by the
    tokens the run itself adds)."""

    def __init__(self) -> None:
        self._counts: list[int] = []
        self._durations_ms: list[float] = []

    @property
    def mark(self) -> int:
        """Where a request that joins now begins."""
        return len(self._counts)

    def add(self, steps: int, total_ms: float) -> None:
        self._counts.append(steps)
        self._durations_ms.append(total_ms / steps)

    def since(self, mark: int) -> list[tuple[float, int]]:
        """(duration of a step, steps) of each run."""
        return list(zip(self._durations_ms[mark:], self._counts[mark:], strict=True))


def later_first(runs: Sequence[tuple[float, int]], wait_ms: float) -> Sequence[tuple[float, int]]:
    """The same with the first interval longer by `wait_ms`."""
    if not wait_ms or not runs:
        return runs
    first_ms, steps = runs[0]
    return [(first_ms + wait_ms, 1), (first_ms, steps - 1), *runs[1:]]


def tail_mean_ms(runs: Sequence[tuple[float, int]], share: float = TAIL_SHARE) -> float:
    """Mean of the longest `share` of all intervals, the paper's TBT of one request; 0 without intervals."""
    total = sum(steps for _, steps in runs)
    if not total:
        return 0.0
    wanted = left = max(1, round(total * share))
    spent_ms = 0.0
    for duration_ms, steps in sorted(runs, reverse=True):
        taken = min(steps, left)
        spent_ms += taken * duration_ms
        left -= taken
        if not left:
            break
    return spent_ms / wanted
