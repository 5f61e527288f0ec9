"""How deep each holder of a chain reaches, by bisection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from router.core.block import Block


def levels(blocks: Mapping[int, Block], chain: Sequence[int], among: int) -> list[tuple[int, int]]:
    """(depth, holders whose deepest block of the chain is number depth - 1), deepest first; no holder appears
    twice.

    `among` masks the holders that count. Relies on the prefix property: who holds a block holds all before
    it. Of a holder with a hole some block it does hold is found, or none.
    Looks at O(k * log(len(chain) / k)) blocks for k distinct depths: what a bisection sees on its way to the
    deepest serves the next ones. Looking is written out: with many depths a call would be half the time.
    """
    found: list[tuple[int, int]] = []
    get = blocks.get
    block = get(chain[0]) if chain else None
    held = block.holders & among if block is not None else 0
    if not held:
        return found
    block = get(chain[-1])
    whole = block.holders & among if block is not None else 0
    if whole:
        found.append((len(chain), whole))
    unseen = among & ~whole
    # Of each piece: its ends, and who holds the block at its beginning. Who holds that at its end was seen.
    pieces = [(0, len(chain) - 1, held)]
    while pieces:
        low, high, held = pieces.pop()
        held &= unseen
        if not held:
            continue  # nobody's depth lies in it
        while high - low > 1:
            middle = (low + high) >> 1
            block = get(chain[middle])
            holders = block.holders & unseen if block is not None else 0
            if holders:
                pieces.append((low, middle, held))
                low, held = middle, holders
            else:
                high = middle
        found.append((high, held))
        unseen &= ~held
    return found
