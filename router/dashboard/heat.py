"""Which prefixes are asked for most, in bounded memory. Pure; one thread.

A prompt counts at its prefixes of 1, 2, 4, 8 ... blocks, so one request costs a handful of dict lookups and a
prefix's length is known to within a factor of two. Rates come from two windows: the one under way and the one
before it, which fades out as the first goes on.
"""

from __future__ import annotations

from collections.abc import Sequence

WINDOW_S = 60.0
MAX_PREFIXES = 1 << 14
# A prefix most of whose requests go on to one longer prefix is that longer one.
_COVERED_SHARE = 0.8


class HotPrefix:
    """`block_hash` ends it; `num_blocks` is a lower bound of what its prompts share. `hit_share`: of its
    requests, those that went where all of it was cached."""

    __slots__ = ("block_hash", "hit_share", "num_blocks", "requests_per_min")

    def __init__(self, block_hash: int, num_blocks: int, requests_per_min: float, hit_share: float) -> None:
        self.block_hash = block_hash
        self.num_blocks = num_blocks
        self.requests_per_min = requests_per_min
        self.hit_share = hit_share


class _Count:
    __slots__ = ("before", "hits_before", "hits_now", "now", "num_blocks", "parent")

    def __init__(self, num_blocks: int, parent: int | None) -> None:
        self.num_blocks = num_blocks
        self.parent = parent
        self.now = self.before = self.hits_now = self.hits_before = 0


class PrefixHeat:
    def __init__(self, max_prefixes: int = MAX_PREFIXES) -> None:
        self._max_prefixes = max_prefixes
        self._counts: dict[int, _Count] = {}
        self._window_began_at = 0.0

    def __len__(self) -> int:
        return len(self._counts)

    def note(self, block_hashes: Sequence[int], hit_blocks: int) -> None:
        """One request with this prompt; `hit_blocks` leading ones were cached where it went."""
        counts, num_blocks, parent = self._counts, 1, None
        while num_blocks <= len(block_hashes):
            block_hash = block_hashes[num_blocks - 1]
            count = counts.get(block_hash)
            if count is None:
                if len(counts) >= self._max_prefixes:
                    return  # until `tidy` has made room
                counts[block_hash] = count = _Count(num_blocks, parent)
            count.now += 1
            if num_blocks <= hit_blocks:
                count.hits_now += 1
            parent = block_hash
            num_blocks *= 2

    def tidy(self, now: float) -> None:
        """To be called every few seconds: begins a new window when it is time, forgets what has cooled."""
        num_windows = int((now - self._window_began_at) / WINDOW_S)
        if num_windows:
            self._window_began_at += num_windows * WINDOW_S
            for count in self._counts.values():
                count.before, count.hits_before = (count.now, count.hits_now) if num_windows == 1 else (0, 0)
                count.now = count.hits_now = 0
            self._counts = {h: count for h, count in self._counts.items() if count.before}
        if len(self._counts) >= self._max_prefixes:
            # Asked for once: most of them, and sorting them all would stop the event loop for 50 ms.
            self._counts = {h: count for h, count in self._counts.items() if count.now + count.before > 1}
            self._keep_hottest(self._max_prefixes // 2)

    def _keep_hottest(self, num_prefixes: int) -> None:
        if len(self._counts) > num_prefixes:
            # Short ones last: without its beginnings a long one could not be found by `hottest`.
            kept = sorted(
                self._counts.items(), key=lambda item: (-item[1].now - item[1].before, item[1].num_blocks)
            )
            self._counts = dict(kept[:num_prefixes])

    def hottest(self, num_prefixes: int, now: float) -> list[HotPrefix]:
        """By the blocks they account for, most first; asked for at least twice."""
        fading = max(0.0, 1.0 - (now - self._window_began_at) / WINDOW_S)
        weights = {h: count.now + count.before * fading for h, count in self._counts.items()}
        covered = set()
        for block_hash, count in self._counts.items():
            parent = count.parent
            if parent is not None and weights[block_hash] >= _COVERED_SHARE * weights.get(parent, 0.0):
                covered.add(parent)
        ranked = sorted(
            (h for h in self._counts if weights[h] >= 2.0 and h not in covered),
            key=lambda h: weights[h] * self._counts[h].num_blocks,
            reverse=True,
        )
        return [self._hot_prefix(h, weights[h]) for h in ranked[:num_prefixes]]

    def _hot_prefix(self, block_hash: int, weight: float) -> HotPrefix:
        count = self._counts[block_hash]
        hit_share = (count.hits_now + count.hits_before) / (count.now + count.before)
        return HotPrefix(block_hash, count.num_blocks, weight * 60.0 / WINDOW_S, hit_share)
