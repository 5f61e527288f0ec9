"""How often prefixes have been asked for, whether they were served or not.

A long prompt that is refused for its cost stays expensive, and so does every later prompt that begins the
same way. Knowing how often a beginning is asked for lets admission share its cost among those who will use
it. Counted at a few depths of each prompt (anchors), so that a request costs tens of operations whatever its
length.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

GROWTH = 1.25  # each anchor lies this many times as deep as the one before


def anchor_depths(num_blocks: int) -> Iterator[int]:
    """1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, ... up to `num_blocks`."""
    depth = 1
    while depth <= num_blocks:
        yield depth
        depth = max(depth + 1, int(depth * GROWTH))


class Demand:
    """Memory is bounded by `max_anchors`: those not asked for the longest are forgotten."""

    def __init__(self, max_anchors: int = 1 << 18) -> None:
        self._max_anchors = max_anchors
        self._counts: OrderedDict[int, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._counts)

    def observe(self, block_hashes: Sequence[int], is_again: bool = False) -> list[tuple[int, int]]:
        """(depth, requests so far that began with so many of these blocks, this one not counted) for each
        anchor; then this one is counted, unless it `is_again` the same request."""
        counts = self._counts
        found = []
        for depth in anchor_depths(len(block_hashes)):
            anchor = block_hashes[depth - 1]
            count = counts.pop(anchor, 0)
            if is_again:
                count = max(count - 1, 0)
            counts[anchor] = count + 1
            found.append((depth, count))
        while len(counts) > self._max_anchors:
            counts.popitem(last=False)
        return found
