"""Things that end at a time: a heap that forgets cheaply, and the one earliest moment the shell must know."""

import heapq
from collections.abc import Hashable
from itertools import count
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)
NEVER = float("inf")


class Agenda:
    """`earliest`: no deadline is before it. The shell arms its one timer for it and calls Store.expire."""

    def __init__(self) -> None:
        self.earliest = NEVER

    def expect(self, when: float) -> None:
        self.earliest = min(self.earliest, when)


class Deadlines(Generic[T]):
    """At most one deadline an item; setting it again moves it."""

    def __init__(self, agenda: Agenda) -> None:
        self._agenda = agenda
        self._due_at: dict[T, float] = {}
        self._heap: list[tuple[float, int, T]] = []
        self._numbers = count()

    def set(self, item: T, when: float) -> None:
        self._due_at[item] = when
        heapq.heappush(self._heap, (when, next(self._numbers), item))
        self._agenda.expect(when)
        # Leases last seconds and are released in milliseconds: without this the heap would be mostly dead.
        if len(self._heap) > 64 + 2 * len(self._due_at):
            self._heap = [entry for entry in self._heap if self._due_at.get(entry[2]) == entry[0]]
            heapq.heapify(self._heap)

    def drop(self, item: T) -> None:
        self._due_at.pop(item, None)

    def pop_due(self, now: float) -> list[T]:
        """The items whose time has come, earliest first; they have no deadline any more."""
        due: list[T] = []
        while self._heap and self._heap[0][0] <= now:
            when, _, item = heapq.heappop(self._heap)
            if self._due_at.get(item) == when:
                del self._due_at[item]
                due.append(item)
        return due

    def next(self) -> float:
        """When the next one is due; NEVER when there is none."""
        while self._heap:
            when, _, item = self._heap[0]
            if self._due_at.get(item) == when:
                return when
            heapq.heappop(self._heap)
        return NEVER

    def __len__(self) -> int:
        return len(self._due_at)
