"""Reading traces, scaling them, making them up."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvcore.errors import ConfigError
from kvsim.trace import read_trace
from kvsim.workload import Synthetic, poisson_arrivals, replay_faster, synthesize, window

HEAD = Path(__file__).parents[2] / "data" / "synthetic_trace_head.jsonl"


def test_a_mooncake_trace_is_read_as_it_is() -> None:
    trace = read_trace(HEAD)
    rows = [json.loads(line) for line in HEAD.read_text().splitlines()]
    assert len(trace.requests) == len(rows) == 500
    assert [r.hash_ids for r in trace.requests] == [tuple(row["hash_ids"]) for row in rows]
    assert [r.prompt_tokens for r in trace.requests] == [row["input_length"] for row in rows]
    assert trace.requests[-1].at == pytest.approx(rows[-1]["timestamp"] / 1e3)
    assert trace.num_blocks == sum(len(row["hash_ids"]) for row in rows)


def test_azure_csv_has_clock_times_with_seven_digits(tmp_path: Path) -> None:
    file = tmp_path / "azure.csv"
    file.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n"
        "2023-11-16 18:17:05.4799600,110,27\n"
    )
    first, second = read_trace(file).requests
    assert (first.prompt_tokens, first.output_tokens, first.at, first.hash_ids) == (4808, 10, 0.0, ())
    assert second.at == pytest.approx(1.5)


def test_lengths_in_json_lines_come_out_in_order_of_arrival(tmp_path: Path) -> None:
    file = tmp_path / "lengths.jsonl"
    file.write_text(
        '{"arrived_at": 3.0, "num_prefill_tokens": 30, "num_decode_tokens": 3}\n\n'
        '{"arrived_at": 1.0, "num_prefill_tokens": 10, "num_decode_tokens": 1}\n'
    )
    assert [(r.at, r.prompt_tokens) for r in read_trace(file).requests] == [(0.0, 10), (2.0, 30)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no requests"),
        ("nonsense\n", "line 1: is no JSON"),
        ("[1]\n", "one JSON object a line"),
        ('{"timestamp": 0, "input_length": 5}\n', "an output length is missing"),
        ('{"timestamp": 0, "output_length": 5}\n', "a prompt length is missing"),
        ('{"input_length": 5, "output_length": 5}\n', "an arrival time is missing"),
        ('{"timestamp": 0, "input_length": 0, "output_length": 5}\n', "make no request"),
        (
            '{"timestamp": 0, "input_length": 513, "output_length": 5, "hash_ids": [1]}\n',
            "1 hash_ids for 513 tokens; blocks of 512 tokens make 2",
        ),
        ('{"timestamp": 0, "input_length": 5.5, "output_length": 5}\n', "5.5 is no whole number"),
        (
            '{"timestamp": 0, "input_length": 1e400, "output_length": 5}\n',
            "a prompt length of inf is no number",
        ),
        (
            '{"timestamp": NaN, "input_length": 5, "output_length": 5}\n',
            "an arrival time of nan is no number",
        ),
        ('{"timestamp": "noon", "input_length": 5, "output_length": 5}\n', "an arrival time of 'noon'"),
        ('{"TIMESTAMP": "noon", "input_length": 5, "output_length": 5}\n', "TIMESTAMP is 'noon', not a time"),
        (
            '{"timestamp": 0, "input_length": 5, "output_length": 5, "priority": "high"}\n',
            "a priority of 'high'",
        ),
        *(
            (
                '{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": ' + ids + "}\n",
                "a list of integers",
            )
            for ids in ("7", '["x"]', "[-1]", "[18446744073709551616]", "[1.5]", "[true]")
        ),
    ],
)
def test_a_bad_trace_says_what_is_wrong_and_where(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words) as raised:
        read_trace(file)
    assert "bad.jsonl" in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"requests_per_s": float("inf")}, "requests_per_s must be in"),
        ({"requests_per_s": 0.0}, "requests_per_s must be in"),
        (
            {"prompt_tokens": 1000, "max_prompt_tokens": 100},
            "max_prompt_tokens 100 is below prompt_tokens 1000",
        ),
        ({"prefix_ratio": 1.5}, "prefix_ratio must be in"),
    ],
)
def test_a_bad_synthetic_load_says_what_is_wrong(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Synthetic(**changes)


def test_a_missing_trace_is_an_error_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.jsonl: cannot be read"):
        read_trace(tmp_path / "nowhere.jsonl")


def test_a_window_begins_at_zero_and_an_empty_one_is_refused() -> None:
    trace = read_trace(HEAD)
    part = window(trace, 30.0, 60.0)
    assert 0 < len(part.requests) < len(trace.requests)
    assert part.requests[0].at >= 0 and part.requests[-1].at < 30.0
    with pytest.raises(ConfigError, match="it lasts"):
        window(trace, 1e6, 0.0)


def test_replaying_twice_as_fast_halves_the_duration_and_nothing_else() -> None:
    trace = read_trace(HEAD)
    fast = replay_faster(trace, 2.0)
    assert fast.duration_s == pytest.approx(trace.duration_s / 2)
    assert [r.hash_ids for r in fast.requests] == [r.hash_ids for r in trace.requests]


def test_poisson_arrivals_have_the_rate_and_are_repeatable() -> None:
    trace = read_trace(HEAD)
    drawn = poisson_arrivals(trace, 5.0, seed=3)
    assert len(drawn.requests) / drawn.duration_s == pytest.approx(5.0, rel=0.15)
    assert drawn == poisson_arrivals(trace, 5.0, seed=3) != poisson_arrivals(trace, 5.0, seed=4)


def test_synthetic_prompts_share_the_wanted_part_with_their_group() -> None:
    spec = Synthetic(
        num_requests=200, prompt_tokens=16384, max_prompt_tokens=32768, prefix_ratio=0.5, num_groups=4
    )
    trace = synthesize(spec, seed=1)
    assert all(16384 <= r.prompt_tokens <= 32768 for r in trace.requests)
    assert all(len(r.hash_ids) == -(-r.prompt_tokens // 512) for r in trace.requests)
    seen: set[int] = set()
    shared = total = 0
    for request in trace.requests:
        hits = sum(1 for hash_id in request.hash_ids if hash_id in seen)
        shared, total = shared + hits, total + len(request.hash_ids)
        seen.update(request.hash_ids)
    assert shared / total == pytest.approx(0.5, abs=0.06)
