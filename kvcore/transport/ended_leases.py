"""Leases nobody reads under any more, and how the store learns of it."""

import collections
import contextlib

from kvcore.transport.channel import Call, Channel
from kvcore.wire.messages import Acquire, Release

# How much of the pool an idle client may hold on to, in how many leases, and how long these last.
MAX_LINGERING_BYTES = 16 << 20
MAX_LINGERING_LEASES = 4
LINGERING_LEASE_MS = 2000


class EndedLeases:
    """A message of its own costs the store as much as an Acquire, so what holds up little waits for the next
    one; should none come, the lease ends by time. Thread-safe."""

    def __init__(self, channel: Channel, lease_ms: int) -> None:
        self._channel = channel
        self._lease_ms = lease_ms
        # (lease, bytes it holds up). Its appends, pops and copies are atomic.
        self._lingering: collections.deque[tuple[int, int]] = collections.deque()

    def duration_ms(self, size_bytes: int) -> int:
        """How long to ask for when so much is to be read."""
        may_linger = size_bytes <= MAX_LINGERING_BYTES
        return min(self._lease_ms, LINGERING_LEASE_MS) if may_linger else self._lease_ms

    def acquire(
        self, keys: list[bytes], lease_ms: int, layer_begin: int, layer_end: int, wait_ms: int, stall_s: float
    ) -> Call:
        """Starts an Acquire, which tells the store of those that have ended."""
        return self._channel.start(
            Acquire,
            (keys, lease_ms, layer_end, wait_ms, layer_begin, self.take()),
            stall_s=stall_s,
            wait_s=wait_ms / 1e3,
        )

    def end(self, lease: int, size_bytes: int) -> None:
        lingering = [held_bytes for _, held_bytes in list(self._lingering)]
        has_room = (
            len(lingering) < MAX_LINGERING_LEASES and sum(lingering) + size_bytes <= MAX_LINGERING_BYTES
        )
        if size_bytes > 0 and has_room:
            self._lingering.append((lease, size_bytes))
        else:
            self._channel.forget(Release, (lease,))

    def take(self) -> list[int]:
        """Those that end with the next Acquire."""
        taken: list[int] = []
        with contextlib.suppress(IndexError):
            while True:
                taken.append(self._lingering.popleft()[0])
        return taken

    def settle(self) -> None:
        """Ends them all at once: before asking for what a lease forbids."""
        for lease in self.take():
            self._channel.forget(Release, (lease,))
