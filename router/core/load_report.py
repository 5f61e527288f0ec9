"""What an instance says of its own load."""

from __future__ import annotations

import msgspec


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """An instance's own word, as of `sampled_at` (when it was asked). -1: it does not say.

    `waiting_prefill_tokens` are prompt tokens not computed yet (SGLang's num_waiting_uncached_tokens).
    """

    sampled_at: float
    running_requests: int
    waiting_requests: int
    waiting_prefill_tokens: int = -1
    kv_used_tokens: int = -1
    kv_capacity_tokens: int = -1
