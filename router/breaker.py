"""Keeps requests away from an instance that keeps failing, without waiting for the next health check.

Pure: the caller passes `now` (seconds of one monotonic clock). What counts as a failure is the caller's rule:
no connection, a timeout, a broken response, a 5xx; never a 4xx, which is the client's
(vllm-project/router PR 60).
"""

from collections import deque
from typing import Annotated

import msgspec
from msgspec import Meta


def _positive(text: str) -> Meta:
    return Meta(gt=0, description=text)


class BreakerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    enabled: Annotated[bool, Meta(description="keep requests away from engines that fail")] = True
    failure_threshold: Annotated[int, _positive("failures within the window that open the breaker")] = 10
    success_threshold: Annotated[int, _positive("good answers in a row that close it again")] = 3
    window_ms: Annotated[float, _positive("in which failures are counted")] = 120_000
    open_ms: Annotated[float, _positive("until one request at a time may try again")] = 60_000


class Breaker:
    def __init__(self, config: BreakerConfig) -> None:
        self._config = config
        self._failures: deque[float] = deque(maxlen=config.failure_threshold)
        self._open_until = 0.0
        self._successes = 0
        self.is_closed = True

    def admits(self, now: float, in_flight: int) -> bool:
        """Whether one more request may go to the instance, which has `in_flight` of ours now."""
        return self.is_closed or (now >= self._open_until and in_flight == 0)

    def succeeded(self) -> None:
        if self.is_closed:
            return
        self._successes += 1
        if self._successes >= self._config.success_threshold:
            self.close()

    def failed(self, now: float) -> None:
        if not self._config.enabled:
            return
        failures = self._failures
        failures.append(now)
        full = len(failures) == self._config.failure_threshold
        if not self.is_closed or (full and (now - failures[0]) * 1e3 <= self._config.window_ms):
            self.is_closed = False
            self._successes = 0
            self._open_until = now + self._config.open_ms / 1e3

    def close(self) -> None:
        """Also for a health check that succeeds again after failures: the engine was restarted."""
        self.is_closed = True
        self._successes = 0
        self._failures.clear()
