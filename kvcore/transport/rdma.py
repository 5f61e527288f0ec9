"""The rdma plane: bytes move by one-sided requests of the client's devices; the store's processor has no part
in it. Messages, and what RDMA cannot do right now, go over the control connection.

Reads: Acquire -> READ -> the lease ends. Writes: (Reserve has granted the extents) WRITE -> Commit.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from kvcore.layout import total_bytes
from kvcore.transport.base import Buffer, Region, WriteBatch
from kvcore.transport.channel import Channel
from kvcore.transport.commit_order import CommitOrder
from kvcore.transport.ended_leases import EndedLeases
from kvcore.transport.held_grants import HeldGrants
from kvcore.transport.host_plane import HostPlane
from kvcore.transport.parts import Observer, PartsTransfer, Reservation, Sink, cut, plan_write
from kvcore.transport.rdma_host import RdmaHost
from kvcore.transport.rdma_mover import Mover
from kvcore.transport.rdma_path import RdmaPath
from kvcore.transport.rdma_read import RdmaReadPart
from kvcore.transport.rdma_write import AfterWrites, RdmaPutPart, RdmaWritePart
from kvcore.transport.tcp import TcpTransport
from kvcore.transport.verbs import PathOptions, RdmaUnavailable
from kvcore.wire.messages import RdmaOffer, Status

logger = logging.getLogger(__name__)

# Up to here bytes in the message beat two round trips and a READ between them.
INLINE_BYTES = 16 << 10
UNLIMITED_BYTES = 1 << 62


class RdmaPart(Protocol):
    """One request of a batch, with the moving that belongs to it."""

    indices: Sequence[int]
    moved_bytes: int

    def poll(self) -> bool:
        """Goes on with what can be gone on with; True when `finish` would not wait long."""
        ...

    def finish(self, deadline: float) -> list[Status]: ...


class RdmaTransfer:
    """Implements Transfer over the requests of one batch."""

    def __init__(
        self, parts: Sequence[RdmaPart], statuses: list[Status], timeout_s: float, observe: Observer
    ) -> None:
        self._parts = parts
        self._statuses = statuses
        self._timeout_s = timeout_s
        self._observe = observe
        self._is_finished = False

    def done(self) -> bool:
        if not self._is_finished:
            # All of them: each may have something to go on with.
            have_ended = [part.poll() for part in self._parts]
            return all(have_ended)
        return True

    def wait(self, timeout_ms: float | None = None) -> list[Status]:
        if not self._is_finished:
            deadline = time.monotonic() + (self._timeout_s if timeout_ms is None else timeout_ms / 1e3)
            for part in self._parts:
                part.poll()
            for part in self._parts:
                for index, status in zip(part.indices, part.finish(deadline), strict=True):
                    self._statuses[index] = status
            self._is_finished = True
            self._observe(self._statuses, sum(part.moved_bytes for part in self._parts))
        return list(self._statuses)


class RdmaTransport(HostPlane):
    """Implements Transport. Reads and puts of up to so many bytes in all go through `inline`."""

    name = "rdma"

    def __init__(
        self,
        inline: TcpTransport,
        host: RdmaHost,
        offer: RdmaOffer,
        *,
        lease_ms: int,
        verify: bool,
        options: PathOptions | None = None,
        inline_read_bytes: int = INLINE_BYTES,
        inline_put_bytes: int = INLINE_BYTES,
    ) -> None:
        self.channel: Channel = inline.channel
        self.timeout_s = inline.timeout_s
        self.checksums = inline.checksums
        self.reservations: dict[bytes, Reservation] = inline.reservations
        self.host = host
        self.pool_size_bytes = offer.pool_size_bytes
        self.verify = verify
        self.inline_read_bytes = inline_read_bytes
        self.inline_put_bytes = inline_put_bytes
        self.lease_ms = lease_ms
        self.leases = EndedLeases(self.channel, lease_ms)
        self.held = HeldGrants(self.leases)
        self.commits = CommitOrder()
        self.mover = Mover()
        self._inline = inline
        self._inline_keys = 0
        self._lock = threading.Lock()
        options = options or PathOptions()
        self._paths = [
            RdmaPath(self.mover, self.channel, host, here, there, options)
            for here, there in pair_devices(len(host.devices), offer.devices)
        ]
        self.mover.paths = self._paths

    def open(self, timeout_s: float) -> None:
        """RdmaUnavailable when no path can be had: all of them are closed again then."""
        deadline = time.monotonic() + timeout_s
        reasons = []
        for path in self._paths:
            try:
                path.open(max(0.0, deadline - time.monotonic()))
            except RdmaUnavailable as error:
                reasons.append(f"{path.name}: {error}")
        if not self.mover.num_live:
            self.let_go()
            raise RdmaUnavailable("; ".join(reasons))
        for reason in reasons:
            logger.warning("rdma path %s; it is tried again in the background", reason)

    def register(self, buffer: Buffer) -> Region:
        return self.host.register(buffer)

    def submit_read(
        self,
        keys: list[bytes],
        sizes_bytes: Sequence[int],
        sink: Sink,
        layer_begin: int = 0,
        layer_end: int = 0,
        wait_ms: int = 0,
    ) -> RdmaTransfer | PartsTransfer:
        if sum(sizes_bytes) <= self.inline_read_bytes or not self.mover.num_live:
            return self._inline.submit_read(keys, sizes_bytes, sink, layer_begin, layer_end, wait_ms)
        parts = []
        for run in cut(sizes_bytes, UNLIMITED_BYTES, self.channel.max_keys):
            # Layers are read one after the other, under one lease.
            size_bytes = sum(sizes_bytes[run.start : run.stop])
            lease_ms = self.lease_ms if layer_end else self.leases.duration_ms(size_bytes)
            part = RdmaReadPart(self, run, keys[run.start : run.stop], sink, lease_ms)
            part.send(layer_begin, layer_end, wait_ms)
            parts.append(part)
        return self._transfer(parts, len(keys), self._inline.on_read, wait_ms)

    def submit_put(
        self, keys: list[bytes], values: Sequence[list[memoryview]]
    ) -> RdmaTransfer | PartsTransfer:
        """Whole objects of one layer."""
        sizes_bytes = [total_bytes(views) for views in values]
        if sum(sizes_bytes) <= self.inline_put_bytes or not self.mover.num_live:
            return self._inline.submit_put(keys, values)
        parts = [
            RdmaPutPart(
                self,
                run,
                keys[run.start : run.stop],
                values[run.start : run.stop],
                sizes_bytes[run.start : run.stop],
            )
            for run in cut(sizes_bytes, UNLIMITED_BYTES, self.channel.max_keys)
        ]
        return self._transfer(parts, len(keys), self._inline.on_write)

    def submit_write(self, batch: WriteBatch) -> RdmaTransfer:
        runs, statuses = plan_write(batch, self.reservations, self.channel, with_checksums=self.checksums)
        parts = [RdmaWritePart(self, run, batch.layer_begin, batch.layer_end) for run in runs]
        for part in parts:
            part.start()
        return self._transfer(parts, len(batch.keys), self._inline.on_write, statuses=statuses)

    def after_writes(self, say: Callable[[], None]) -> None:
        self.commits.add(AfterWrites(say))

    def settle(self) -> None:
        self.held.settle()
        self.leases.settle()

    def count_inline(self, num_keys: int) -> None:
        """So many keys that were meant for RDMA go over the control connection."""
        with self._lock:
            self._inline_keys += num_keys

    def counters(self) -> dict[str, int | str]:
        return {
            "rdma_paths": len(self._paths),
            "rdma_paths_live": self.mover.num_live,
            "rdma_moved_bytes_total": self.mover.moved_bytes,
            "rdma_inline_keys_total": self._inline_keys,
            "rdma_retried_loads_total": self.mover.retried_loads,
            "rdma_connects_total": sum(path.num_connects for path in self._paths),
            "rdma_last_error": next((path.last_error for path in self._paths if path.last_error), ""),
        }

    def let_go(self) -> None:
        for path in self._paths:
            path.close()

    def leave_to_parent(self) -> None:
        for path in self._paths:
            path.leave_to_parent()

    def close(self) -> None:
        # First the queue pairs: afterwards the store may use the extents for something else.
        self.let_go()
        self._inline.close()
        for path in self._paths:
            path.join()

    def _transfer(
        self,
        parts: Sequence[RdmaPart],
        num_keys: int,
        observe: Observer,
        wait_ms: int = 0,
        statuses: list[Status] | None = None,
    ) -> RdmaTransfer:
        if statuses is None:
            statuses = [Status.INVALID] * num_keys
        return RdmaTransfer(parts, statuses, self.timeout_s + wait_ms / 1e3, observe)


def pair_devices(num_here: int, there: Sequence[str]) -> list[tuple[int, str]]:
    """The i-th device here with the i-th there: rails of a cluster are numbered alike. Whoever has fewer uses
    each several times."""
    return [(index % num_here, there[index % len(there)]) for index in range(max(num_here, len(there)))]
