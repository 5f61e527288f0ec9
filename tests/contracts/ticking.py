"""How long other threads keep Python's lock from one that wants to run."""

import resource
import time

MAX_LOCK_WAIT_S = 0.001


def longest_lock_wait_s(seconds: float) -> float:
    """Runs Python for so long in the calling thread, which must be one beside the one under test; returns the
    longest time it had to wait for the lock.

    On a busy machine a thread also stands still because others have its CPU. The kernel tells the two apart:
    who waits for a lock has given its CPU up, who is pushed off has not.
    """
    longest_s = 0.0
    before = time.perf_counter()
    given_up = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    end = before + seconds
    while before < end:  # also once behind it: a wait may be longer than the time that is left
        now = time.perf_counter()
        count = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        if count != given_up:
            longest_s = max(longest_s, time.perf_counter() - before)
        before, given_up = now, count
    return longest_s
