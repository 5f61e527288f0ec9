"""Virtual time: a heap of things that will happen."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Agenda:
    """What is due at the same time happens in the order it was planned, so that a run can be repeated."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._planned = 0

    def at(self, when: float, happen: Callable[[float], None]) -> None:
        """`happen` is called with the time it is due; never before what is already due."""
        self._planned += 1
        heapq.heappush(self._heap, (max(when, self.now), self._planned, happen))

    def step(self) -> bool:
        """The next thing happens; False when there is none."""
        if not self._heap:
            return False
        self.now, _, happen = heapq.heappop(self._heap)
        happen(self.now)
        return True

    def run(self) -> None:
        while self.step():
            continue
