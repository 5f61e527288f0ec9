"""Placements expected but not yet reported: what keeps a burst of equal prompts together.

Between sending a request and the engine's first KV event lies a whole prefill. Requests that come meanwhile
must know where the prefix will be. Only some blocks of a chain are remembered (anchors), in two generations
of which the older is thrown away every `ttl_s`: nothing to expire one by one. A prediction that was wrong
(the request failed) is believed for at most two lifetimes.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.core.levels import levels

ANCHOR_STRIDE_BLOCKS = 8


class PredictedPlacements:
    """`ttl_s` should exceed queue and prefill time; memory is bounded by `max_anchors` per generation."""

    def __init__(self, ttl_s: float, max_anchors: int = 1 << 19) -> None:
        self._ttl_s = ttl_s
        self._max_anchors = max_anchors
        self._rotated_at = 0.0
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}

    @property
    def num_anchors(self) -> int:
        return len(self._young) + len(self._old)

    def add(self, worker: int, block_hashes: Sequence[int], now: float) -> None:
        self._rotate(now)
        young, bit = self._young, 1 << worker
        for depth in _anchors(len(block_hashes)):
            block_hash = block_hashes[depth - 1]
            young[block_hash] = young.get(block_hash, 0) | bit

    def forget(self, worker: int) -> None:
        for generation in (self._young, self._old):
            for block_hash, workers in generation.items():
                generation[block_hash] = workers & ~(1 << worker)

    def levels(self, block_hashes: Sequence[int], now: float) -> list[tuple[int, int]]:
        """(depth in blocks, bitmask of workers whose deepest anchor that is), deepest first."""
        self._rotate(now)
        if not self._young and not self._old:
            return []
        young, old = self._young.get, self._old.get
        anchors = _anchors(len(block_hashes))

        def workers_at(index: int) -> int:
            block_hash = block_hashes[anchors[index] - 1]
            return young(block_hash, 0) | old(block_hash, 0)

        return [(anchors[index - 1], workers) for index, workers in levels(workers_at, len(anchors))]

    def _rotate(self, now: float) -> None:
        age_s = now - self._rotated_at
        if age_s >= self._ttl_s or len(self._young) >= self._max_anchors:
            self._old = self._young if age_s < 2 * self._ttl_s else {}
            self._young = {}
            self._rotated_at = now


def _anchors(num_blocks: int) -> Sequence[int]:
    """Depths remembered: 1, 2, 4, then every eighth. A short shared prefix is found, a long one roughly."""
    short = (1, 2, 4)[: min(num_blocks.bit_length(), 3)]
    return (*short, *range(ANCHOR_STRIDE_BLOCKS, num_blocks + 1, ANCHOR_STRIDE_BLOCKS))
