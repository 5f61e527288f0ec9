"""Time as an argument: cores never look at the clock, shells hand them `clock.now()`."""

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds from an arbitrary origin; never goes back."""
        ...


class WallClock:
    """CLOCK_MONOTONIC: on one host comparable across processes."""

    def now(self) -> float:
        return time.monotonic()


class VirtualClock:
    """A clock that moves only when told (tests, simulation)."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError("time does not go back")
        self._now += seconds
