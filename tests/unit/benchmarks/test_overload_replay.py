"""The overload benchmark's replay of a trace: parts, prompts, compressed time, and the engine's memory."""

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace
from overloadbench.client import Answer
from overloadbench.engine import Engine
from overloadbench.plan import Models, Setup
from overloadbench.replay import Replay, as_answers, part, prompt
from overloadbench.runner import summed_up
from overloadbench.tables import differences

from kvcore.errors import ConfigError
from kvsim.runs import read_any, simulate
from kvsim.trace import Trace, TraceRequest
from router.core.block_hash import block_hashes

HEAD = str(Path(__file__).resolve().parents[2] / "data" / "synthetic_trace_head.jsonl")
BLOCK = 4


def request(at: float, tokens: int, *hash_ids: int) -> TraceRequest:
    return TraceRequest(at, tokens, 10, hash_ids)


def trace(*requests: TraceRequest) -> Trace:
    return Trace("t", requests, BLOCK)


def test_prompts_share_what_the_traces_do_and_nothing_else() -> None:
    one, other = prompt(request(0, 10, 7, 8, 9), BLOCK), prompt(request(0, 12, 7, 8, 3), BLOCK)
    assert list(one) == [7, 7, 7, 7, 8, 8, 8, 8, 9, 9]
    assert (len(one), len(other)) == (10, 12)
    hashes, others = block_hashes(one, BLOCK), block_hashes(other, BLOCK)
    assert hashes == others[:2] and len(others) == 3
    assert list(prompt(request(0, 10, 7, 8, 9), BLOCK)) == list(one)


def test_an_id_that_is_no_token_id_is_refused() -> None:
    with pytest.raises(ConfigError, match="4294967296 is above"):
        prompt(request(0, 4, 1 << 32), BLOCK)


def test_parts_make_the_whole_trace_at_its_speed() -> None:
    replay = Replay(path="t", length_s=30.001, rounds=3, speed=2.0, block_size_tokens=BLOCK)
    whole = trace(*(request(float(at), 4, at) for at in (0, 4, 10, 11, 20, 29, 30)))
    parts = [part(replay, whole, number) for number in range(3)]
    assert [[one.prompt[0] for one in found] for found in parts] == [[0, 4, 10], [11, 20], [29, 30]]
    assert [one.at_s for one in parts[0]] == [0.0, 2.0, 5.0]
    assert all(one.at_s < replay.seconds for found in parts for one in found)


def test_a_trace_without_prefixes_is_refused() -> None:
    replay = Replay(path="azure.csv", length_s=1.0, rounds=1)
    with pytest.raises(ConfigError, match=r"azure\.csv: requests without hash_ids"):
        part(replay, trace(request(0, 4)), 0)


def test_compressing_changes_no_ratio() -> None:
    setup = replace(Replay(path="t", length_s=60.0).setup, compress=10.0, decode_ms=500.0)
    played = setup.as_played()
    assert played.ttft_slo_ms == setup.ttft_slo_ms / 10 and played.tbt_slo_ms == setup.tbt_slo_ms / 10
    assert played.decode_ms == 50.0
    prefill, decode = setup.models.prefill, setup.models.decode
    assert played.models.prefill.compute_ms(9000, 512) == pytest.approx(prefill.compute_ms(9000, 512) / 10)
    assert played.models.decode.tbt_ms(20, 90_000) == pytest.approx(decode.tbt_ms(20, 90_000) / 10)
    # What is not a duration stays.
    assert (played.router_share, played.expected_output_tokens) == (0.9, setup.expected_output_tokens)
    answer = Answer(70.0, ttft_ms=200.0, tbt_ms=8.0, tokens=5, late_ms=1.0).slower(10.0)
    assert answer == Answer(70.0, ttft_ms=2000.0, tbt_ms=80.0, tokens=5, late_ms=10.0)


def test_the_engine_remembers_full_blocks_and_computes_the_last_token() -> None:
    async def hits() -> list[int]:
        engine = Engine(Setup(models=Models(), block_size_tokens=BLOCK))
        prompts = [
            request(0, 10, 7, 8, 9),
            request(0, 10, 7, 8, 9),
            request(0, 8, 7, 8),
            request(0, 9, 7, 5, 6),
        ]
        return [engine.remember(list(prompt(one, BLOCK))) for one in prompts]

    assert asyncio.run(hits()) == [0, 8, 7, 4]


def test_the_simulator_is_given_the_same_cluster_and_summed_up_the_same_way() -> None:
    """A burst: prefill gives out at once, whoever admits."""
    length_s = read_any(HEAD).duration_s + 1e-3
    replay = Replay(path=HEAD, length_s=length_s, rounds=1, speed=20.0, num_prefill=2, num_decode=2)
    config = replay.sim_config("early", 0)
    assert config.settings().prefill_model == replay.setup.models.prefill
    assert config.settings().decode_model == replay.setup.models.decode
    assert config.settings().ttft_slo_ms == replay.ttft_slo_ms * replay.router_share
    turns = []
    for admission in ("baseline", "early", "predictive", "predictive_request"):
        answers, counted = as_answers(simulate(replay.sim_config(admission, 0)).outcomes)
        figures = summed_up(replay.setup, admission, 0, answers, counted)
        assert figures.answered + figures.num_refused == figures.offered < len(answers)
        assert figures.refused and 0 < figures.cached_share < 1
        assert (figures.prefilled_in_vain > 0) <= (admission == "baseline")
        assert figures.good_tokens > 0
        turns.append(figures)
    found = differences(turns, seed=0)
    assert found["baseline - early"].mean == turns[0].num_refused - turns[1].num_refused
    assert len(found) == 6
