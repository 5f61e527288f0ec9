"""Waiting for what another process will know soon."""

import time
from collections.abc import Callable

_PAUSE_S = 0.01


def wait_until(is_so: Callable[[], bool], timeout_s: float, pause_s: float = _PAUSE_S) -> bool:
    """False when it did not come about in time."""
    deadline_s = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(pause_s)
    return True
