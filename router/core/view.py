"""What a decision is made from: the request, and the cluster as the router knows it at one moment.

All of it is immutable, so a decision can be kept, explained and replayed. Times named `*_at` and `now` are
seconds of the caller's clock (kvcore.clock); durations end in `_ms`; lengths are tokens unless they say
blocks.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from kvcore.wire.events import Medium

NO_WORKER = -1


class Role(str, enum.Enum):
    """What an instance does."""

    MIXED = "mixed"
    PREFILL = "prefill"
    DECODE = "decode"


class RequestView(msgspec.Struct, frozen=True, gc=False):
    """One request, as far as scheduling cares.

    `block_hashes` is the router's own hash chain over the prompt's full blocks (core.block_hash), empty when
    the prompt was not tokenised. `priority` is vLLM's: lower is served earlier, 0 is normal. SLOs of 0 mean
    the cluster's. `excluded` names instances already tried for this request. `waited_ms`: since it came, when
    it was refused before and held to be asked again; it counts as part of the TTFT. `dp_rank`: only instances
    of this data parallel rank will do.
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
    waited_ms: float = 0.0
    dp_rank: int | None = None


class InstanceState(msgspec.Struct, frozen=True, gc=False):
    """One engine instance (one DP rank, where ranks can be steered).

    `instance_id` is its base URL, with "@rank" for a DP rank. `worker` is its number in the prefix index,
    `store_worker` that of the store node on its host. `in_flight_requests` are ours, `foreign_requests` those
    others sent (last poll). `prefill_free_at` is when the prefills already sent will have been computed,
    `backlog_ms` the part of them that has certainly not begun. `running_requests` are those decoding or bound
    to; they hold `kv_used_tokens` of `kv_capacity_tokens` (0: unknown). The scales are measured / predicted
    duration on this instance, corrected online. `decoding_requests` have begun to decode and hold about
    `decoding_kv_tokens`: the load of this moment, without those that still wait for their prefill.
    """

    instance_id: str
    worker: int = NO_WORKER
    store_worker: int = NO_WORKER
    in_flight_requests: int = 0
    foreign_requests: int = 0
    prefill_free_at: float = 0.0
    backlog_ms: float = 0.0
    running_requests: int = 0
    kv_used_tokens: int = 0
    kv_capacity_tokens: int = 0
    prefill_scale: float = 1.0
    tbt_scale: float = 1.0
    decoding_requests: int = 0
    decoding_kv_tokens: float = 0.0

    @property
    def load(self) -> int:
        """Requests on it, whoever sent them."""
        return self.in_flight_requests + self.foreign_requests

    def queue_ms(self, now: float) -> float:
        """Milliseconds until a prefill sent now would begin (the paper's EstimatePrefillQueueTime)."""
        return max((self.prefill_free_at - now) * 1e3, self.backlog_ms, 0.0)


class PrefixMatch(Protocol):
    """Who holds how much of one prompt."""

    @property
    def best_blocks(self) -> int:
        """The longest prefix anybody holds from whom another instance could fetch it."""
        ...

    @property
    def best_worker(self) -> int:
        """A holder of `best_blocks`; NO_WORKER when that is 0."""
        ...

    @property
    def best_medium(self) -> Medium:
        """Where `best_worker` has them."""
        ...

    @property
    def has_slow_media(self) -> bool:
        """Some holder has blocks on another medium than its GPU."""
        ...

    def local_blocks_of(self, instances: Sequence[InstanceState]) -> Sequence[int]:
        """Leading blocks that each, or the store node on its host, holds on whatever medium."""
        ...

    def blocks_by_medium(self, instance: InstanceState) -> tuple[int, int, int, int]:
        """Those of one instance by Medium, each block counted where it is read fastest."""
        ...


class PrefixSource(Protocol):
    """The prefix index as a policy sees it."""

    @property
    def block_size_tokens(self) -> int: ...

    def match(self, block_hashes: Sequence[int], now: float) -> PrefixMatch: ...


class DecodeForecast(Protocol):
    """Which decode load is on its way (core.forecast)."""

    @property
    def mean_decode_ms(self) -> float:
        """Measured mean duration of a request's decoding: the paper's uniform t_d."""
        ...

    def uniform_load_at(self, at: float, decode_ms: float) -> tuple[float, float]:
        """(requests decoding, KV tokens they hold) at time `at` if each decodes for `decode_ms`."""
        ...

    def expected_load_at(self, at: float, now: float) -> tuple[float, float]:
        """The same, with each request's own predicted output length."""
        ...


class ClusterView(msgspec.Struct, frozen=True):
    """The pools hold available instances only: healthy, not draining, breaker closed.

    Either `mixed` is filled (an instance prefills and decodes) or `prefill` and `decode` are. `prefix` and
    `forecast` are live objects of the caller, read during the decision and never kept. `worker_ids` names the
    workers of the prefix index, store nodes included; `transfers_from` counts the copies each is sending.
    """

    mixed: tuple[InstanceState, ...] = ()
    prefill: tuple[InstanceState, ...] = ()
    decode: tuple[InstanceState, ...] = ()
    prefix: PrefixSource | None = None
    forecast: DecodeForecast | None = None
    worker_ids: Mapping[int, str] = {}
    transfers_from: Mapping[int, int] = {}
