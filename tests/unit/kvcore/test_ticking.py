"""The measure by which waits are judged must itself see a lock that is kept."""

import ctypes
import threading
import time
from collections.abc import Callable

from tests.contracts.ticking import MAX_LOCK_WAIT_S, longest_lock_wait_s

MICROSECONDS = 300_000


def measured_beside(wait: Callable[[int], object]) -> float:
    found: list[float] = []
    ticker = threading.Thread(target=lambda: found.append(longest_lock_wait_s(0.2)))
    ticker.start()
    wait(MICROSECONDS)
    ticker.join()
    return found[0]


def test_a_lock_that_is_kept_while_waiting_is_seen() -> None:
    keep = ctypes.PyDLL(None).usleep
    # Not where the ticking thread is so late that the wait is over before it begins.
    assert any(measured_beside(keep) > 100 * MAX_LOCK_WAIT_S for _ in range(10))


def test_a_wait_without_the_lock_is_not_taken_for_one_with_it() -> None:
    # On its way into the wait the other thread holds the lock, and may lose its CPU just then.
    waits = (measured_beside(lambda microseconds: time.sleep(microseconds / 1e6)) for _ in range(10))
    assert any(seconds < MAX_LOCK_WAIT_S for seconds in waits)
