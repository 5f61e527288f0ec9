"""Hit rate against capacity, without a cluster: the cache alone (the paper's figure 9)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from kvsim.block_cache import BlockCache
from kvsim.trace import Trace


class Hits(msgspec.Struct, frozen=True):
    """A hit is a block of the longest leading run that is held; what lies behind the first miss is
    useless."""

    hit_blocks: int
    total_blocks: int
    hit_tokens: int
    total_tokens: int

    @property
    def of_blocks(self) -> float:
        return self.hit_blocks / self.total_blocks if self.total_blocks else 0.0

    @property
    def of_tokens(self) -> float:
        return self.hit_tokens / self.total_tokens if self.total_tokens else 0.0


class HitRate(Hits, frozen=True):
    """Of which cache."""

    eviction_policy: str
    capacity_blocks: int


class Cache(Protocol):
    """`leading` begins with the number of leading blocks held; `keep`: they were used or computed."""

    def leading(self, keys: Sequence[bytes]) -> tuple[int, int]: ...

    def keep(self, keys: Sequence[bytes]) -> object: ...


def replay(trace: Trace, cache: Cache, warmup_requests: int = 0) -> Hits:
    """Of one cache that sees every request; the first `warmup_requests` only fill it."""
    hit_blocks = total_blocks = hit_tokens = total_tokens = 0
    block_size = trace.block_size_tokens
    for number, request in enumerate(trace.requests):
        keys = [hash_id.to_bytes(8, "big") for hash_id in request.hash_ids]
        held, _ = cache.leading(keys)
        cache.keep(keys)
        if number >= warmup_requests:
            hit_blocks += held
            total_blocks += len(keys)
            hit_tokens += min(held * block_size, request.prompt_tokens)
            total_tokens += request.prompt_tokens
    return Hits(hit_blocks, total_blocks, hit_tokens, total_tokens)


def hit_rate(trace: Trace, eviction_policy: str, capacity_blocks: int, warmup_requests: int = 0) -> HitRate:
    """By the rules of the store."""
    hits = replay(trace, BlockCache(eviction_policy, capacity_blocks), warmup_requests)
    counts = hits.hit_blocks, hits.total_blocks, hits.hit_tokens, hits.total_tokens
    return HitRate(*counts, eviction_policy, capacity_blocks)


def hit_rates(
    trace: Trace, eviction_policies: Sequence[str], capacities_blocks: Sequence[int]
) -> list[HitRate]:
    return [hit_rate(trace, name, capacity) for name in eviction_policies for capacity in capacities_blocks]
