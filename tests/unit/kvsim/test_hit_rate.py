"""Hit rates against the package kvcache-simulator."""

from pathlib import Path

import pytest
from kvcache_sim.plan import build_execution_plan
from kvcache_sim.policies import simulate_policy
from kvcache_sim.trace import parse_trace_file

from kvsim.hit_rate import hit_rate, hit_rates
from kvsim.trace import read_trace

HEAD = Path(__file__).parents[2] / "data" / "synthetic_trace_head.jsonl"


@pytest.mark.parametrize("capacity_blocks", [10, 100, 500, 1_000, 3_000])
def test_they_equal_those_of_kvcache_simulator(capacity_blocks: int) -> None:
    plan = build_execution_plan(parse_trace_file(HEAD, block_size=512))
    expected = simulate_policy(plan, "lru", capacity_blocks)
    ours = hit_rate(read_trace(HEAD), "prefix_lru", capacity_blocks, plan.warmup_requests)
    assert (ours.hit_tokens, ours.total_tokens) == (expected.hitTokens, expected.totalTokens)


def test_more_room_never_hurts_lru() -> None:
    rates = hit_rates(read_trace(HEAD), ["lru"], [1_000, 2_000, 4_000, 100_000])
    assert [r.of_tokens for r in rates] == sorted(r.of_tokens for r in rates)
