"""What callers ask for, and how far it is."""

import enum
import threading
from collections.abc import Sequence
from typing import NamedTuple

from kvcore.transport.engine.memory import LocalMemory
from kvcore.transport.engine.messages import RemoteMemory
from kvcore.transport.topology import Cards


class Direction(enum.Enum):
    READ = "read"
    WRITE = "write"


class Segment(NamedTuple):
    """A peer as it described itself: its address, what it has registered, and its cards by place of memory.
    Open it again to see what it registered since."""

    address: str
    memories: tuple[RemoteMemory, ...]
    matrix: dict[str, Cards]
    takes_tcp: bool

    def memory_at(self, address: int, size_bytes: int) -> RemoteMemory | None:
        return next((memory for memory in self.memories if memory.covers(address, size_bytes)), None)


class TransferRequest(NamedTuple):
    """`size_bytes` between `source`, an address in registered memory here, and `target`, one at the peer.
    WRITE goes to the peer, READ comes from it."""

    direction: Direction
    source: int
    segment: Segment
    target: int
    size_bytes: int


class TransferState(enum.Enum):
    WAITING = "waiting"
    COMPLETED = "completed"
    FAILED = "failed"
    TIMED_OUT = "timed out"


class TransferStatus(NamedTuple):
    """Of one request. `reason` says why it failed. Unless it is COMPLETED, the target holds some of the new
    bytes and some of the old ones; unless it is WAITING, the engine touches neither side any more."""

    state: TransferState
    transferred_bytes: int
    reason: str = ""


class RequestProgress:
    """One request under way; the worker's. What it names stays registered until the batch ends."""

    __slots__ = ("batch", "local", "moved_bytes", "pending", "reason", "remote", "request", "timed_out")

    def __init__(
        self, batch: "Batch", request: TransferRequest, local: LocalMemory, remote: RemoteMemory
    ) -> None:
        self.batch = batch
        self.request = request
        self.local = local
        self.remote = remote
        self.pending = 0
        self.moved_bytes = 0
        self.reason = ""
        self.timed_out = False

    def status(self) -> TransferStatus:
        if self.pending:
            return TransferStatus(TransferState.WAITING, self.moved_bytes)
        if self.timed_out:
            return TransferStatus(TransferState.TIMED_OUT, self.moved_bytes, self.reason)
        if self.reason:
            return TransferStatus(TransferState.FAILED, self.moved_bytes, self.reason)
        return TransferStatus(TransferState.COMPLETED, self.moved_bytes)


class Batch:
    """Requests submitted together. `deadline_s` is one of time.monotonic()."""

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.progress: Sequence[RequestProgress] = ()
        self.done = threading.Event()

    def moved(self, progress: RequestProgress, size_bytes: int) -> bool:
        """One slice is through; True when it was the last of the batch."""
        progress.moved_bytes += size_bytes
        return self._ended(progress)

    def lost(self, progress: RequestProgress, reason: str, *, timed_out: bool = False) -> bool:
        """One slice will not be moved; True when it was the last of the batch."""
        progress.reason = progress.reason or reason
        progress.timed_out |= timed_out
        return self._ended(progress)

    def _ended(self, progress: RequestProgress) -> bool:
        progress.pending -= 1
        return not any(item.pending for item in self.progress)
