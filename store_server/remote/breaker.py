"""When to stop asking a remote that does not answer."""

FAILURES_IN_A_ROW = 5
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0


class Breaker:
    """Open after some failures in a row: then nothing is asked but, after a pause, whether it is back. The
    pause doubles with each answer that is a failure."""

    def __init__(self) -> None:
        self._failures = 0
        self.pause_s = FIRST_PAUSE_S

    @property
    def is_open(self) -> bool:
        return self._failures >= FAILURES_IN_A_ROW

    def failed(self) -> bool:
        """Whether this was the one that opened it."""
        self._failures += 1
        if self._failures > FAILURES_IN_A_ROW:
            self.pause_s = min(2 * self.pause_s, LONGEST_PAUSE_S)
        return self._failures == FAILURES_IN_A_ROW

    def succeeded(self) -> bool:
        """Whether this was the one that closed it."""
        was_open = self.is_open
        self._failures = 0
        self.pause_s = FIRST_PAUSE_S
        return was_open
