"""Grants that go on holding for who reads the same blocks layer after layer: one Acquire, not one a layer.

Only what has been committed when the store answered is read under them; who follows a writer asks again.
"""

import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from kvcore.transport.ended_leases import EndedLeases
from kvcore.transport.lease_time import safe_end_s
from kvcore.wire.messages import Grant, Status

MAX_HELD = 4
# Of a lease; with less left of it a new one is asked for.
MIN_SHARE_LEFT = 0.25


class Held(NamedTuple):
    lease: int
    grants: Sequence[Grant]
    leased_at_s: float
    lease_ms: int

    def is_over(self, share_left: float = 0.0) -> bool:
        end_s = safe_end_s(self.leased_at_s, self.lease_ms)
        return time.monotonic() > end_s - share_left * self.lease_ms / 1e3

    def covers(self, layer_end: int) -> bool:
        """Whether these layers (0: all) of every key were there when it was granted."""
        return all(
            grant.status == Status.OK and (layer_end or grant.num_layers) <= grant.layers_ready
            for grant in self.grants
        )


class HeldGrants:
    """Thread-safe. What is taken is the taker's alone until it is put back."""

    def __init__(self, leases: EndedLeases) -> None:
        self._leases = leases
        self._lock = threading.Lock()
        self._held: dict[tuple[bytes, ...], Held] = {}

    def take(self, keys: Sequence[bytes], layer_end: int) -> Held | None:
        if not self._held:
            return None
        with self._lock:
            held = self._held.pop(tuple(keys), None)
        if held is None or (held.covers(layer_end) and not held.is_over(MIN_SHARE_LEFT)):
            return held
        self._leases.end(held.lease, 0)
        return None

    def put_back(self, keys: Sequence[bytes], held: Held, layer_end: int, moved_bytes: int) -> None:
        """Layers up to `layer_end` (0: all) have been read. Ends the lease if nothing is left to read."""
        last = max((grant.num_layers for grant in held.grants), default=0)
        is_useful = 0 < layer_end < last and held.covers(layer_end + 1) and not held.is_over(MIN_SHARE_LEFT)
        ended = held
        if is_useful:
            with self._lock:
                pushed_out = self._held.pop(tuple(keys), None)
                self._held[tuple(keys)] = held
                if len(self._held) > MAX_HELD:
                    pushed_out = self._held.pop(next(iter(self._held)))
            if pushed_out is None:
                return
            ended = pushed_out
            moved_bytes = 0
        if ended.lease:
            self._leases.end(ended.lease, moved_bytes)

    def settle(self) -> None:
        """Ends them all."""
        with self._lock:
            leases = [held.lease for held in self._held.values()]
            self._held.clear()
        for lease in leases:
            self._leases.end(lease, 0)
