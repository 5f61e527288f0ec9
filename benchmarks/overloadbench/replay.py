"""Parts of a production trace, played to a real router and to the simulator alike. Pure.

The cluster is that of the paper's overload experiment as `kvsim.paper.overload` has it: nodes of 8 x A800
with LLaMA3-70B, TTFT within 30 s and TBT within 100 ms, the trace at twice its speed. On both sides nodes
remember every prompt they computed and share none of it.
"""

from array import array
from collections.abc import Sequence

import msgspec

from kvcore.errors import ConfigError
from kvsim.config import ClusterSpec, SimConfig, Slo, TraceSpec
from kvsim.engine_model import EngineSpec
from kvsim.job import Outcome
from kvsim.trace import Trace, TraceRequest
from kvsim.workload import replay_faster, window
from overloadbench.client import Answer
from overloadbench.plan import Models, Request, Setup
from overloadbench.runner import Counted
from router.core.settings import Settings

_ENGINE = EngineSpec()
_ENDLESS_BYTES = 1 << 50
# One event for so many tokens: a few hundred streams of single tokens would measure this machine.
_EVENT_TOKENS = 16


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """The trace in `rounds` parts of equal length, each to an empty cluster; `length_s`: of the whole, before
    `speed`. The first quarter of a part fills the cluster and is not counted."""

    path: str
    length_s: float
    speed: float = 2.0
    rounds: int = 6
    num_prefill: int = 8
    num_decode: int = 8
    ttft_slo_ms: float = 30_000.0
    tbt_slo_ms: float = 100.0
    router_share: float = 0.9
    compress: float = 15.0
    block_size_tokens: int = 512

    @property
    def part_s(self) -> float:
        return self.length_s / self.rounds

    @property
    def seconds(self) -> float:
        """Of a part as it is replayed."""
        return self.part_s / self.speed

    def bounds_s(self, round_number: int) -> tuple[float, float]:
        return round_number * self.part_s, (round_number + 1) * self.part_s

    @property
    def setup(self) -> Setup:
        return Setup(
            models=Models(_ENGINE.prefill_model(), _ENGINE.decode_model()),
            num_prefill=self.num_prefill,
            num_decode=self.num_decode,
            ttft_slo_ms=self.ttft_slo_ms,
            tbt_slo_ms=self.tbt_slo_ms,
            router_share=self.router_share,
            warm_up_s=self.seconds / 4,
            expected_output_tokens=Settings().expected_output_tokens,
            block_size_tokens=self.block_size_tokens,
            event_tokens=_EVENT_TOKENS,
            compress=self.compress,
        )

    def sim_config(self, admission: str, round_number: int) -> SimConfig:
        """The same part on the same cluster with the same settings, for the simulator."""
        begin_s, end_s = self.bounds_s(round_number)
        return SimConfig(
            name=admission,
            seed=1,
            trace=TraceSpec(
                path=self.path,
                speed=self.speed,
                begin_s=begin_s,
                end_s=end_s,
                block_size_tokens=self.block_size_tokens,
            ),
            cluster=ClusterSpec(
                prefill_nodes=self.num_prefill,
                decode_nodes=self.num_decode,
                dram_bytes=_ENDLESS_BYTES,
                cache_scope="node",
            ),
            engine=_ENGINE,
            slo=Slo(ttft_ms=self.ttft_slo_ms, tbt_ms=self.tbt_slo_ms),
            scheduling=Settings(
                admission=admission,
                ttft_slo_ms=self.ttft_slo_ms * self.router_share,
                tbt_slo_ms=self.tbt_slo_ms * self.router_share,
            ),
        )


def part(replay: Replay, trace: Trace, round_number: int) -> list[Request]:
    """ConfigError for a part without requests, and for requests without hash ids: nothing is known of what
    such prompts share."""
    begin_s, end_s = replay.bounds_s(round_number)
    cut = replay_faster(window(trace, begin_s, end_s), replay.speed)
    if not all(request.hash_ids for request in cut.requests):
        raise ConfigError(f"{replay.path}: requests without hash_ids cannot be made into prompts")
    return [
        Request(request.at, prompt(request, replay.block_size_tokens), max(request.output_tokens, 2))
        for request in cut.requests
    ]


def prompt(request: TraceRequest, block_size_tokens: int) -> Sequence[int]:
    """Token ids that are equal where, and only where, the trace says that prompts are: a block is its hash id
    over and over. ConfigError for an id that is no token id (u32)."""
    tokens = array("I")
    try:
        for hash_id in request.hash_ids:
            tokens.extend(array("I", (hash_id,)) * block_size_tokens)
    except OverflowError:
        raise ConfigError(f"hash id {hash_id} is above 2^32 - 1 and cannot be a token id") from None
    return tokens[: request.prompt_tokens]


def as_answers(outcomes: Sequence[Outcome]) -> tuple[list[Answer], Counted]:
    """What the simulator says, as the clients of a real router and its engines would."""
    answers = [
        Answer(one.arrived_at, one.ttft_ms, one.mean_tbt_ms, _tokens(one))
        if one.is_served
        else Answer(one.arrived_at, tokens=_tokens(one), refused=one.reject_reason)
        for one in outcomes
    ]
    prefilled = [one for one in outcomes if one.is_served or one.wasted_prefill]
    return answers, Counted(
        sum(one.wasted_prefill for one in prefilled),
        sum(one.prompt_tokens for one in prefilled),
        sum(one.hit_tokens for one in prefilled),
    )


def _tokens(outcome: Outcome) -> int:
    return outcome.prompt_tokens + outcome.output_tokens
