"""The benchmark's textbook rules against a plain OrderedDict, and its command."""

import json
from collections import OrderedDict
from pathlib import Path

import pytest

from benchmarks.eviction import RULES, main
from kvsim.hit_rate import replay
from kvsim.trace import Trace, read_trace
from store_server.core.eviction import POLICIES

TRACE_PATH = Path(__file__).parents[2] / "data" / "synthetic_trace_head.jsonl"


@pytest.fixture(scope="module")
def trace() -> Trace:
    return read_trace(TRACE_PATH)


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
    result = replay(trace, RULES["plain"]("lru", capacity_blocks))
    assert (result.hit_blocks, result.total_blocks) == (hit_blocks, sum(map(len, requests)))


@pytest.mark.parametrize("rules", ["plain", "store"])
@pytest.mark.parametrize("name", list(POLICIES))
def test_no_policy_beats_the_ideal_and_all_reach_it_with_room(trace: Trace, name: str, rules: str) -> None:
    distinct_blocks = trace.num_distinct_blocks
    ideal = replay(trace, RULES["plain"]("lru", distinct_blocks))
    assert replay(trace, RULES[rules](name, distinct_blocks)) == ideal
    assert 0 < replay(trace, RULES[rules](name, distinct_blocks // 10)).hit_blocks <= ideal.hit_blocks


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
    with pytest.raises(SystemExit, match=r"bad\.jsonl, request 1: "):
        main([str(bad)])
    with pytest.raises(SystemExit):
        main([str(TRACE_PATH), "--policies", "lru,best"])
    assert "unknown policy best; there are lru" in capsys.readouterr().err
