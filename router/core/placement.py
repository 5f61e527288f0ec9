"""Placements expected but not yet reported: what keeps a burst of equal prompts together.

Between sending a request and the engine's first KV event lies a whole prefill. Requests that come meanwhile
must know where the prefix will be. A chain is found by a few of its blocks (anchors, at depths 1, 2, 4, 8 and
so on) and then compared block by block.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence


class Placement:
    """One request's prompt on its way to `worker`."""

    __slots__ = ("block_hashes", "expires_at", "worker")

    def __init__(self, worker: int, block_hashes: Sequence[int], expires_at: float) -> None:
        self.worker = worker
        self.block_hashes = block_hashes
        self.expires_at = expires_at


class PredictedPlacements:
    """`ttl_s`: how long after its expected time a placement is believed without any event; `settled_ttl_s`:
    how late events may be once the prefill is known to be done.

    Of several placements on one worker that share an anchor the latest is remembered, so what is found may be
    too little, never too much. Memory is bounded by `max_placements`, and by `max_blocks` in all of them:
    those that expire first go first.
    """

    def __init__(
        self,
        ttl_s: float,
        settled_ttl_s: float = 1.0,
        max_placements: int = 1 << 16,
        max_blocks: int = 1 << 22,
    ) -> None:
        self._ttl_s = ttl_s
        self._settled_ttl_s = settled_ttl_s
        self._max_placements = max_placements
        self._max_blocks = max_blocks
        self._num_blocks = 0
        # Most anchors have one worker: a dict for each of those would be most of the memory, and most of what
        # the garbage collector looks through.
        self._by_anchor: dict[int, Placement | dict[int, Placement]] = {}
        self._expiries: list[tuple[float, int, Placement]] = []  # a heap; outdated entries are passed over
        self._num_added = 0

    def __len__(self) -> int:
        """Placements kept, some of them outdated."""
        return len(self._expiries)

    def add(self, worker: int, block_hashes: Sequence[int], now: float, expected_at: float) -> Placement:
        self._expire(now)
        placement = Placement(worker, block_hashes, expected_at + self._ttl_s)
        self._num_blocks += len(block_hashes)
        by_anchor, depth = self._by_anchor, 1
        while depth <= len(block_hashes):
            anchor = block_hashes[depth - 1]
            found = by_anchor.get(anchor)
            if isinstance(found, dict):
                found[worker] = placement
            elif found is None or found.worker == worker:
                by_anchor[anchor] = placement
            else:
                by_anchor[anchor] = {found.worker: found, worker: placement}
            depth *= 2
        self._schedule_expiry(placement)
        return placement

    def settle(self, placement: Placement, now: float) -> None:
        """The prefill is done: its events are due, and from then on they are the truth."""
        self._expire(now)
        placement.expires_at = now + self._settled_ttl_s
        self._schedule_expiry(placement)

    def withdraw(self, placement: Placement) -> None:
        """It will not come about, or no longer counts."""
        by_anchor, depth = self._by_anchor, 1
        while depth <= len(placement.block_hashes):
            anchor = placement.block_hashes[depth - 1]
            found = by_anchor.get(anchor)
            if found is placement:
                del by_anchor[anchor]
            elif isinstance(found, dict) and found.get(placement.worker) is placement:
                del found[placement.worker]
                if not found:
                    del by_anchor[anchor]
            depth *= 2
        # The heap may keep the placement for a while, but not its blocks.
        self._num_blocks -= len(placement.block_hashes)
        placement.block_hashes = ()

    def forget(self, worker: int) -> None:
        for _, _, placement in self._expiries:
            if placement.worker == worker:
                self.withdraw(placement)

    def levels(self, block_hashes: Sequence[int], now: float) -> list[tuple[int, int]]:
        """(depth in blocks, bitmask of workers expected to hold so many), deepest first."""
        self._expire(now)
        if not self._by_anchor or not block_hashes:
            return []
        deepest: dict[int, tuple[Placement, int]] = {}
        anchor_depth = 1
        while anchor_depth <= len(block_hashes):
            found = self._by_anchor.get(block_hashes[anchor_depth - 1])
            if found is None:
                break
            if isinstance(found, Placement):
                deepest[found.worker] = found, anchor_depth
            else:
                for worker, placement in found.items():
                    deepest[worker] = placement, anchor_depth
            anchor_depth *= 2
        workers_at: dict[int, int] = {}
        for worker, (placement, at_least) in deepest.items():
            depth = _shared_blocks(placement.block_hashes, block_hashes, at_least)
            workers_at[depth] = workers_at.get(depth, 0) | 1 << worker
        return sorted(workers_at.items(), reverse=True)

    def workers_at(self, anchor: int) -> Collection[int]:
        """Workers expected to hold the prefix ending in this block, a power of two of blocks long."""
        found = self._by_anchor.get(anchor)
        if isinstance(found, Placement):
            return (found.worker,)
        return found.keys() if found is not None else ()

    def _schedule_expiry(self, placement: Placement) -> None:
        self._num_added += 1
        heapq.heappush(self._expiries, (placement.expires_at, self._num_added, placement))
        while len(self._expiries) > self._max_placements or self._num_blocks > self._max_blocks:
            self._drop_first()

    def _expire(self, now: float) -> None:
        while self._expiries and self._expiries[0][0] <= now:
            self._drop_first()

    def _drop_first(self) -> None:
        expires_at, _, placement = heapq.heappop(self._expiries)
        if expires_at == placement.expires_at:
            self.withdraw(placement)


def _shared_blocks(one: Sequence[int], other: Sequence[int], at_least: int) -> int:
    """Leading blocks two chains share, given that they share `at_least`. Equal hashes mean equal prefixes."""
    low, high = at_least, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) >> 1
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
