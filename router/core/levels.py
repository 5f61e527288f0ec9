"""How deep each holder of a chain reaches, by bisection."""

from __future__ import annotations

from collections.abc import Callable


def levels(holders_at: Callable[[int], int], size: int) -> list[tuple[int, int]]:
    """(depth, holders whose deepest element is number depth - 1), deepest first; no holder appears twice.

    `holders_at(i)` is a bitmask, 0 <= i < size. Relies on the prefix property: who holds element i holds all
    before it. Of a holder with a hole some element it does hold is found, or none.
    Takes O(distinct depths * log(size)) calls.
    """
    found: list[tuple[int, int]] = []
    seen = 0
    end = size
    first = holders_at(0) if size else 0
    while first & ~seen:
        low, high, deepest = 0, end, 0
        while low < high:
            middle = (low + high) >> 1
            holders = holders_at(middle) & ~seen
            if holders:
                deepest = holders
                low = middle + 1
            else:
                high = middle
        if not low:
            break
        found.append((low, deepest))
        seen |= deepest
        end = low - 1
    return found
