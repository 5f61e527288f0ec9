"""What a client counts. Names end in `_total` when they only grow."""

import threading
from collections.abc import Sequence

from kvcore.wire.messages import Status

HITS_TOTAL = "hits_total"
MISSES_TOTAL = "misses_total"
READ_BYTES_TOTAL = "read_bytes_total"
STORED_TOTAL = "stored_total"
NOT_STORED_TOTAL = "not_stored_total"
WRITTEN_BYTES_TOTAL = "written_bytes_total"
TIMEOUTS_TOTAL = "timeouts_total"
UNAVAILABLE_TOTAL = "unavailable_total"
CORRUPT_TOTAL = "corrupt_total"
CONNECTS_TOTAL = "connects_total"
CONNECT_FAILURES_TOTAL = "connect_failures_total"
CONNECTIONS_LOST_TOTAL = "connections_lost_total"

NAMES = (
    HITS_TOTAL,
    MISSES_TOTAL,
    READ_BYTES_TOTAL,
    STORED_TOTAL,
    NOT_STORED_TOTAL,
    WRITTEN_BYTES_TOTAL,
    TIMEOUTS_TOTAL,
    UNAVAILABLE_TOTAL,
    CORRUPT_TOTAL,
    CONNECTS_TOTAL,
    CONNECT_FAILURES_TOTAL,
    CONNECTIONS_LOST_TOTAL,
)
_OK = Status.OK
_FAILURES = {
    Status.TIMED_OUT: TIMEOUTS_TOTAL,
    Status.UNAVAILABLE: UNAVAILABLE_TOTAL,
    Status.CORRUPT: CORRUPT_TOTAL,
}


class Counters:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values = dict.fromkeys(NAMES, 0)

    def add(self, name: str, count: int = 1) -> None:
        with self._lock:
            self._values[name] += count

    def read(self, statuses: Sequence[Status], size_bytes: int) -> None:
        """One batch of reads has ended."""
        self._batch(statuses, HITS_TOTAL, MISSES_TOTAL, READ_BYTES_TOTAL, size_bytes)

    def written(self, statuses: Sequence[Status], size_bytes: int) -> None:
        self._batch(statuses, STORED_TOTAL, NOT_STORED_TOTAL, WRITTEN_BYTES_TOTAL, size_bytes)

    def snapshot(self) -> dict[str, int | str]:
        with self._lock:
            return dict(self._values)

    def start_over_after_fork(self) -> None:
        """A thread of the parent may have held the lock at the fork; it will never let go of this copy."""
        self._lock = threading.Lock()

    def _batch(self, statuses: Sequence[Status], good: str, bad: str, moved: str, size_bytes: int) -> None:
        num_good = statuses.count(_OK)
        with self._lock:
            values = self._values
            values[good] += num_good
            values[moved] += size_bytes
            if num_good != len(statuses):
                values[bad] += len(statuses) - num_good
                for status, name in _FAILURES.items():
                    values[name] += statuses.count(status)
