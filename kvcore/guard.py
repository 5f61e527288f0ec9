"""Keeps our mistakes out of the engine: nothing may raise into a step."""

import logging
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from kvcore import metrics

P = ParamSpec("P")
T = TypeVar("T")
LOG_INTERVAL_SECONDS = 30.0


class Guard:
    """Reports unexpected errors: every one is counted (`count` gets the counter's name), one per place and
    interval is logged. Thread-safe if `count` is."""

    def __init__(self, logger: logging.Logger, count: Callable[[str], None]) -> None:
        self._logger = logger
        self._count = count
        self._last_logged: dict[str, float] = {}

    def report(self, place: str, error: BaseException) -> None:
        self._count(metrics.HOOK_ERRORS_TOTAL)
        now = time.monotonic()
        if now - self._last_logged.get(place, -LOG_INTERVAL_SECONDS) >= LOG_INTERVAL_SECONDS:
            self._last_logged[place] = now
            self._logger.error("unexpected error in %s; the engine goes on without it", place, exc_info=error)

    def call(self, default: T, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """function(...), or `default` when it raises."""
        try:
            return function(*args, **kwargs)
        except Exception as error:
            self.report(getattr(function, "__name__", str(function)), error)
            return default
