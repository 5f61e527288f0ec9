"""How the loop's thread waits for the next request, and how busy it is."""

import asyncio
import os
import time
from collections.abc import Callable


class Wakefulness:
    """After a request the next one is looked for during `spin_s` seconds before the loop sleeps: it mostly
    comes within a few microseconds, and to be woken takes longer than to answer it. The core is offered to
    others all the while. Belongs to the loop's thread.

    `now` and `thread_s`: seconds that have passed, and those of them that this thread was running.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        spin_s: float,
        now: Callable[[], float] = time.perf_counter,
        thread_s: Callable[[], float] = time.thread_time,
    ) -> None:
        self.spun_s = 0.0
        """What looking in vain has taken of a core."""
        self._loop = loop
        self._spin_s = spin_s
        self._now = now
        self._thread_s = thread_s
        self._is_looking = self._was_served = False
        self._looks_until = self._counted_until_s = 0.0
        self._load_seen = (now(), time.process_time())

    def served(self) -> None:
        """A request has been carried out."""
        self._was_served = True
        if not self._is_looking and self._spin_s:
            self._is_looking = True
            self._loop.call_soon(self._look)

    def load(self) -> float:
        """How much of a core this process has put to use since the last call, 0 to 1."""
        (since, used_s), self._load_seen = self._load_seen, (self._now(), time.process_time() - self.spun_s)
        now, now_used_s = self._load_seen
        return min(max(now_used_s - used_s, 0.0) / max(now - since, 1e-3), 1.0)

    def _look(self) -> None:
        # Once in each turn of the loop, which asks the kernel what has come and does not wait for it.
        thread_s = self._thread_s()
        if self._was_served:
            # Not yielding here: the loop may send the answers of this turn after it.
            self._was_served = False
            self._looks_until = self._now() + self._spin_s
        else:
            self.spun_s += thread_s - self._counted_until_s
            if self._now() >= self._looks_until:
                self._is_looking = False
                return
            os.sched_yield()
        self._counted_until_s = thread_s
        self._loop.call_soon(self._look)
