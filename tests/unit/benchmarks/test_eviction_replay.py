"""The replay against two independent implementations: a plain OrderedDict, and the package
kvcache-simulator."""

import json
from collections import OrderedDict
from pathlib import Path

import pytest
from kvcache_sim.plan import ExecutionPlan, build_execution_plan
from kvcache_sim.policies import simulate_policy
from kvcache_sim.trace import parse_trace_file

from benchmarks.eviction import Trace, main, num_distinct_blocks, read_trace, replay
from store_server.core.eviction import POLICIES

TRACE_PATH = Path(__file__).parents[2] / "data" / "synthetic_trace_head.jsonl"


@pytest.fixture(scope="module")
def trace() -> Trace:
    return read_trace(TRACE_PATH)


@pytest.fixture(scope="module")
def plan() -> ExecutionPlan:
    return build_execution_plan(parse_trace_file(TRACE_PATH, block_size=512))


@pytest.mark.parametrize("capacity_blocks", [1, 100, 1_000, 4_000, 100_000])
def test_plain_lru_is_an_ordered_dict(trace: Trace, capacity_blocks: int) -> None:
    requests = [json.loads(line)["hash_ids"] for line in TRACE_PATH.read_text().splitlines()]
    cache: OrderedDict[int, None] = OrderedDict()
    hit_blocks = 0
    for hash_ids in requests:
        for hash_id in hash_ids:
            if hash_id not in cache:
                break
            hit_blocks += 1
        for hash_id in hash_ids:
            cache[hash_id] = None
            cache.move_to_end(hash_id)
            if len(cache) > capacity_blocks:
                cache.popitem(last=False)
    result = replay(trace, "lru", capacity_blocks)
    assert (result.hit_blocks, result.total_blocks) == (hit_blocks, sum(map(len, requests)))


@pytest.mark.parametrize("capacity_blocks", [10, 100, 500, 1_000, 3_000])
def test_prefix_lru_equals_kvcache_simulator(trace: Trace, plan: ExecutionPlan, capacity_blocks: int) -> None:
    expected = simulate_policy(plan, "lru", capacity_blocks)
    assert expected.measurementMode == "fixed_window"
    result = replay(trace, "prefix_lru", capacity_blocks, "store", num_warmup_requests=plan.warmup_requests)
    assert (result.hit_tokens, result.total_tokens) == (expected.hitTokens, expected.totalTokens)


@pytest.mark.parametrize("rules", ["plain", "store"])
@pytest.mark.parametrize("name", list(POLICIES))
def test_no_policy_beats_the_ideal_and_all_reach_it_with_room(trace: Trace, name: str, rules: str) -> None:
    distinct_blocks = num_distinct_blocks(trace)
    ideal = replay(trace, "lru", distinct_blocks)
    assert replay(trace, name, distinct_blocks, rules) == ideal
    assert 0 < replay(trace, name, distinct_blocks // 10, rules).hit_blocks <= ideal.hit_blocks


def test_the_command_prints_a_table_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(
        [
            str(TRACE_PATH),
            "--capacities",
            "500,1000",
            "--policies",
            "lru,sieve",
            "--json",
            str(tmp_path / "out"),
        ]
    )
    printed = capsys.readouterr().out
    assert "500 requests" in printed and "sieve" in printed
    result = json.loads((tmp_path / "out").read_text())
    assert set(result["hit_rate"]["lru"]) == {"500", "1000"}
    assert 0 < result["hit_rate"]["lru"]["500"] < result["hit_rate"]["lru"]["1000"] < result["ideal"]


def test_bad_input_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"hash_ids": [1], "input_length": 5}\n{"hash_ids": [1]}\n')
    with pytest.raises(SystemExit, match=r"bad\.jsonl, line 2: needs hash_ids and input_length"):
        read_trace(bad)
    with pytest.raises(SystemExit):
        main([str(TRACE_PATH), "--policies", "lru,best"])
    assert "unknown policy best; there are lru" in capsys.readouterr().err
