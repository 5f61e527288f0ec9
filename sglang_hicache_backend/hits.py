"""How much of a prefix all pools together can bring back. Pure.

Semantics of SGLang 0.5.23, HiCacheStorage.batch_exists_v2: a pool of ALL_PAGES serves prefixes up to its
first missing page; one of TRAILING_PAGES (a sliding window, a recurrent state) those whose last pages it has.
"""

from collections.abc import Sequence
from typing import NamedTuple

from sglang_hicache_backend.keys import KV_POOL

ALL_PAGES = "all_pages"
TRAILING_PAGES = "trailing_pages"
POLICIES = (ALL_PAGES, TRAILING_PAGES)


class PoolPages(NamedTuple):
    """`present[i]`: page i of the prefix is stored. `num_trailing`: the window, in pages."""

    name: str
    policy: str
    num_trailing: int
    present: Sequence[bool]


class Restorable(NamedTuple):
    """Lengths in pages. `lengths`: every prefix that all pools can serve, ascending; not only the longest,
    because ranks hold different pages and have to agree on one. `by_pool`: the longest for each alone."""

    num_pages: int
    by_pool: dict[str, int]
    lengths: list[int]


def restorable_prefixes(num_kv_pages: int, pools: Sequence[PoolPages]) -> Restorable:
    lengths = list(range(1, num_kv_pages + 1))
    by_pool = {KV_POOL: num_kv_pages} if num_kv_pages else {}
    for pool in pools:
        served = _served(num_kv_pages, pool)
        if served:
            by_pool[pool.name] = max(served)
        lengths = [length for length in lengths if length in served]
    return Restorable(lengths[-1] if lengths else 0, by_pool, lengths)


def _served(num_kv_pages: int, pool: PoolPages) -> set[int]:
    window = num_kv_pages if pool.policy == ALL_PAGES else max(1, pool.num_trailing)
    served: set[int] = set()
    run = 0  # how many pages before this length are there without a gap
    for length, present in enumerate(pool.present[:num_kv_pages], start=1):
        run = run + 1 if present else 0
        if run >= min(window, length):
            served.add(length)
    return served
