"""What a decision is made from: the request, and the cluster as the router knows it at one moment.

All of it is immutable, so a decision can be kept, explained and replayed. Times named `*_at` and `now` are
seconds of the caller's clock (kvcore.clock); durations end in `_ms`; lengths are tokens unless they say blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

NO_WORKER = -1


class RequestView(msgspec.Struct, frozen=True, gc=False):
    """One request, as far as scheduling cares.

    `block_hashes` is the router's own hash chain over the prompt's full blocks (core.block_hash), empty when
    the prompt was not tokenised. `priority` is vLLM's: lower is served earlier, 0 is normal. SLOs of 0 mean
    the cluster's. `excluded` names instances already tried for this request.
    """

    request_id: str
    prompt_tokens: int = 0
    block_hashes: Sequence[int] = ()
    max_tokens: int = 0
    session_id: str = ""
    tenant: str = "default"
    priority: int = 0
    ttft_slo_ms: float = 0.0
    tbt_slo_ms: float = 0.0
    excluded: frozenset[str] = frozenset()


class InstanceState(msgspec.Struct, frozen=True, gc=False):
    """One engine instance (one DP rank, where ranks can be steered).

    `instance_id` is its base URL, with "@rank" for a DP rank. `worker` is its number in the prefix index.
    `in_flight_requests` are ours; `running_requests` and `waiting_requests` also count what other routers sent
    (last poll), so a request of ours may be counted in two of the three. `prefill_free_at` is when prefills
    already sent will have been computed, `backlog_ms` the part of them that has certainly not begun.
    `kv_used_tokens` of `kv_capacity_tokens` (0: unknown) count what the running requests hold.
    The scales are measured / predicted duration on this instance, corrected online.
    """

    instance_id: str
    worker: int = NO_WORKER
    in_flight_requests: int = 0
    running_requests: int = 0
    waiting_requests: int = 0
    prefill_free_at: float = 0.0
    backlog_ms: float = 0.0
    kv_used_tokens: int = 0
    kv_capacity_tokens: int = 0
    prefill_scale: float = 1.0
    tbt_scale: float = 1.0

    def queue_ms(self, now: float) -> float:
        """Milliseconds until a prefill sent now would begin (the paper's EstimatePrefillQueueTime)."""
        return max((self.prefill_free_at - now) * 1e3, self.backlog_ms, 0.0)


class PrefixMatch(Protocol):
    """Who holds how much of one prompt."""

    @property
    def best_blocks(self) -> int:
        """The longest prefix anybody holds whose blocks another instance could fetch."""
        ...

    @property
    def best_worker(self) -> int:
        """A holder of `best_blocks`; NO_WORKER when that is 0."""
        ...

    def local_blocks(self, worker: int) -> int:
        """Leading blocks that `worker` itself holds, on whatever medium."""
        ...


class PrefixSource(Protocol):
    """The prefix index as a policy sees it."""

    @property
    def block_size_tokens(self) -> int: ...

    def match(self, block_hashes: Sequence[int], now: float) -> PrefixMatch: ...


class DecodeForecast(Protocol):
    """Which decode load is on its way (core.forecast)."""

    def decode_load_at(self, at: float, now: float) -> tuple[int, int]:
        """(requests decoding, KV tokens they hold) predicted over all decode instances for time `at`."""
        ...


class ClusterView(msgspec.Struct, frozen=True):
    """The pools hold available instances only: healthy, not draining, breaker closed.

    Either `mixed` is filled (an instance prefills and decodes) or `prefill` and `decode` are. `prefix` and
    `forecast` are live objects of the caller, read during the decision and never kept. `worker_ids` names the
    workers of the prefix index, store nodes included.
    """

    mixed: tuple[InstanceState, ...] = ()
    prefill: tuple[InstanceState, ...] = ()
    decode: tuple[InstanceState, ...] = ()
    prefix: PrefixSource | None = None
    forecast: DecodeForecast | None = None
    worker_ids: Mapping[int, str] = {}
