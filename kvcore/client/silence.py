"""Tells a slow store from one that has stopped answering. Pure; times are seconds of one monotonic clock."""


class Silence:
    """A store is silent when a deadline is missed, it was due `limit_s` ago or more, and it has sent nothing
    since, nor taken what we had to hold back. One that answers late, but answers, never is; nor is one that
    is still being sent the request."""

    def __init__(self, limit_s: float, now: float) -> None:
        self.limit_s = limit_s
        self._last_heard = now
        self._due_since: float | None = None

    def heard(self, now: float) -> None:
        self._last_heard = now
        self._due_since = None

    def missed(self, now: float, due: float) -> bool:
        """A deadline has passed of a request whose answer could be expected from `due` on. True: silent."""
        if self._due_since is None:
            self._due_since = max(self._last_heard, due)
        return now - self._due_since >= self.limit_s
