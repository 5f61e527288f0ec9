"""Reading without a copy: an object's bytes where the store keeps them, for as long as a lease holds."""

import contextlib
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvcore.transport.channel import Channel
from kvcore.transport.lease_time import safe_end_s
from kvcore.transport.parts import OK_CODE, failure_of, status_of
from kvcore.wire.messages import Ack, Acquire, AcquireReply, Grant, Release, Remove, Renew, Status

if TYPE_CHECKING:
    from kvcore.transport.shm import ShmTransport


class ObjectView:
    """`views`, one after the other, are the object's bytes: read-only, usually a single one. Not thread-safe.

    What was read counts only if `still_valid` says so afterwards: a lease that was not renewed in time, or a
    store that went, may leave other bytes there. Drop all views and what was made of them (numpy arrays,
    slices) before `close`, or at the end of the `with` block; what is kept keeps the whole pool mapped.
    """

    def __init__(self, views: Sequence[memoryview], size_bytes: int) -> None:
        self.views = list(views)
        self.size_bytes = size_bytes

    def still_valid(self) -> bool:
        """Whether all that was read until now was the object."""
        return True

    def renew(self) -> bool:
        """Begins the lease anew. False: it is over, or the store did not answer."""
        return True

    def close(self) -> None:
        """Ends the lease. May be called more than once."""
        self.views.clear()

    def __enter__(self) -> "ObjectView":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class _LeasedView(ObjectView):
    def __init__(
        self,
        views: Sequence[memoryview],
        size_bytes: int,
        channel: Channel,
        lease: int,
        lease_ms: int,
        leased_at: float,
        timeout_s: float,
        mapped: contextlib.ExitStack,
    ) -> None:
        super().__init__(views, size_bytes)
        self._channel = channel
        self._lease = lease
        self._lease_ms = lease_ms
        self._leased_at = leased_at
        self._timeout_s = timeout_s
        self._mapped = mapped
        self._pid = os.getpid()
        self._is_open = True

    def still_valid(self) -> bool:
        if not self._is_open or not self._channel.still_open():
            return False
        return time.monotonic() <= safe_end_s(self._leased_at, self._lease_ms)

    def renew(self) -> bool:
        if not self.still_valid():
            return False
        asked_at = time.monotonic()
        answer = self._channel.ask(Renew, (self._lease, self._lease_ms), asked_at + self._timeout_s)
        if not isinstance(answer, Ack):
            return False
        self._leased_at = asked_at
        return True

    def close(self) -> None:
        if self._is_open and os.getpid() == self._pid:
            self._is_open = False
            super().close()
            self._mapped.close()
            self._channel.forget(Release, (self._lease,))

    def __del__(self) -> None:
        # Not in a forked child: lease and connection are the parent's.
        self.close()


def open_view(plane: "ShmTransport", key: bytes) -> ObjectView | Status:
    """The lease lasts as long as the store gives by default. A Status: why there is no view."""
    channel, asked_at = plane.channel, time.monotonic()
    fields = ([key], plane.lease_ms, 0, 0, 0, plane.leases.take())
    outcome = channel.ask(Acquire, fields, asked_at + plane.timeout_s)
    if not isinstance(outcome, AcquireReply) or len(outcome.grants) != 1:
        return failure_of(outcome)
    grant = outcome.grants[0]
    if grant.status != OK_CODE:
        return status_of(grant.status)
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(plane.mapping.using())
        views = _views_of(pool, grant) if pool is not None else None
        if views is None:
            channel.forget(Release, (outcome.lease,))
            return Status.UNAVAILABLE if pool is None else Status.INVALID
        if plane.finds_corrupt(grant, views, grant.checksums):
            channel.forget(Release, (outcome.lease,))
            channel.forget(Remove, ([key], True))
            return Status.CORRUPT
        return _LeasedView(
            views,
            grant.size_bytes,
            channel,
            outcome.lease,
            plane.lease_ms,
            asked_at,
            plane.timeout_s,
            stack.pop_all(),
        )


def _views_of(pool: memoryview, grant: Grant) -> list[memoryview] | None:
    """None: the extents reach out of the pool, or do not hold the object."""
    pairs = list(zip(grant.extents[::2], grant.extents[1::2], strict=False))
    if any(offset < 0 or size < 1 or offset + size > len(pool) for offset, size in pairs):
        return None
    views, left_bytes = [], grant.size_bytes
    for offset, size in pairs:
        taken = min(size, left_bytes)
        if taken:
            views.append(pool[offset : offset + taken].toreadonly())
        left_bytes -= taken
    return None if left_bytes else views
