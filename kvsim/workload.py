"""Other loads from a trace, and loads without one."""

from __future__ import annotations

import math

import msgspec

from kvcore.errors import ConfigError
from kvsim.trace import Trace, TraceRequest
from router.core.prng import SplitMix64


class Synthetic(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Poisson arrivals of prompts that share a leading `prefix_ratio` of their blocks with others of their
    group, as the simulated data of the paper (arXiv 2407.00079, section 8: 16k to 128k tokens, 512 output
    tokens, prefix ratio 50 %)."""

    num_requests: int = 1000
    requests_per_s: float = 1.0
    prompt_tokens: int = 16384
    max_prompt_tokens: int = 0  # above prompt_tokens: lengths are drawn uniformly between the two
    output_tokens: int = 512
    prefix_ratio: float = 0.5
    num_groups: int = 64
    block_size_tokens: int = 512

    def __post_init__(self) -> None:
        if self.num_requests < 1 or self.prompt_tokens < 1:
            raise ConfigError("synthetic: num_requests and prompt_tokens must be positive")
        if not 0 < self.requests_per_s <= 1e6:
            raise ConfigError(f"synthetic: requests_per_s must be in (0, 1e6], not {self.requests_per_s:g}")
        if self.max_prompt_tokens and self.max_prompt_tokens < self.prompt_tokens:
            raise ConfigError(
                f"synthetic: max_prompt_tokens {self.max_prompt_tokens} is below prompt_tokens "
                f"{self.prompt_tokens}; prompts are drawn between the two"
            )
        if not 0.0 <= self.prefix_ratio <= 1.0:
            raise ConfigError(f"synthetic: prefix_ratio must be in [0, 1], not {self.prefix_ratio}")
        if self.num_groups < 1 or self.block_size_tokens < 1 or self.output_tokens < 1:
            raise ConfigError("synthetic: num_groups, block_size_tokens and output_tokens must be positive")


def synthesize(spec: Synthetic, seed: int) -> Trace:
    prng = SplitMix64(seed)
    at, next_id = 0.0, 0
    group_ids: dict[int, list[int]] = {}
    requests = []
    longest = max(spec.max_prompt_tokens, spec.prompt_tokens)
    for _ in range(spec.num_requests):
        at += exponential(prng, spec.requests_per_s)
        prompt_tokens = spec.prompt_tokens + prng.below(longest - spec.prompt_tokens + 1)
        num_blocks = -(-prompt_tokens // spec.block_size_tokens)
        shared = int(num_blocks * spec.prefix_ratio)
        ids = group_ids.setdefault(prng.below(spec.num_groups), [])
        while len(ids) < shared:
            ids.append(next_id)
            next_id += 1
        own = range(next_id, next_id + num_blocks - shared)
        next_id += num_blocks - shared
        requests.append(TraceRequest(at, prompt_tokens, spec.output_tokens, (*ids[:shared], *own)))
    return Trace(f"synthetic-{spec.prompt_tokens // 1024}k", requests, spec.block_size_tokens)


def exponential(prng: SplitMix64, rate: float) -> float:
    return -math.log((prng.next_u64() + 1) / 2**64) / rate


def window(trace: Trace, begin_s: float, end_s: float) -> Trace:
    """Requests that arrive in [begin, end), moved to begin at 0; `end_s` 0: to the end."""
    end_s = end_s or math.inf
    kept = [r for r in trace.requests if begin_s <= r.at < end_s]
    if not kept:
        raise ConfigError(
            f"no request of {trace.name} arrives between {begin_s:g} s and {end_s:g} s; "
            f"it lasts {trace.duration_s:.0f} s"
        )
    moved = [msgspec.structs.replace(r, at=r.at - begin_s) for r in kept] if begin_s else kept
    return msgspec.structs.replace(trace, requests=moved)


def replay_faster(trace: Trace, speed: float) -> Trace:
    """The same requests in 1 / `speed` of the time (the paper's "2x replay speed")."""
    if not speed > 0:
        raise ConfigError(f"the replay speed must be positive, not {speed}")
    if speed == 1.0:
        return trace
    faster = [msgspec.structs.replace(r, at=r.at / speed) for r in trace.requests]
    return msgspec.structs.replace(trace, requests=faster)


def poisson_arrivals(trace: Trace, requests_per_s: float, seed: int) -> Trace:
    """The trace's requests in their order, arriving as a Poisson process of this rate."""
    prng = SplitMix64(seed)
    at, requests = 0.0, []
    for request in trace.requests:
        at += exponential(prng, requests_per_s)
        requests.append(msgspec.structs.replace(request, at=at))
    return msgspec.structs.replace(trace, requests=requests)
