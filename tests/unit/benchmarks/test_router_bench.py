"""The router's benchmark: what it sends, how figures become verdicts. Not one of them asserts a time."""

import itertools
import json
import shutil
import sys
from pathlib import Path

import msgspec
import pytest
from routerbench.calls import engine_calls
from routerbench.cases import CASES, CHUNKS, NUM_GROUPS, bodies
from routerbench.figures import Figure, figure_of, summaries
from routerbench.load import Load
from routerbench.systems import DIRECT, FLOORS, OURS, PEERS, Running, System
from routerbench.targets import TARGETS, judge
from storebench.processes import Process, SystemFailed, free_port

ENGINE = Path(__file__).resolve().parents[3] / "benchmarks" / "router_engine.py"


def figure(case: str, system: str, number: int, cpu_us: float, **more: float) -> Figure:
    values = {"p50_us": 100.0, "p99_us": 200.0, "first_token_p50_us": 50.0, **more}
    return Figure(
        case=case, system=system, round=number, requests=10, errors=0, seconds=1.0, cpu_us=cpu_us, **values
    )


@pytest.mark.parametrize("name", CASES)
def test_bodies_are_requests_of_the_size_the_case_says(name: str) -> None:
    case = CASES[name]
    for body in itertools.islice(bodies(case), 5):
        request = json.loads(body)
        assert len(request["messages"][0]["content"]) == case.prompt_bytes
        assert request["stream"] is case.stream


def test_long_prompts_begin_alike_and_end_differently() -> None:
    prompts = [
        json.loads(body)["messages"][0]["content"] for body in itertools.islice(bodies(CASES["c4k"]), 200)
    ]
    shared = int(CASES["c4k"].prompt_bytes * 0.9)
    assert len({prompt[:shared] for prompt in prompts}) == NUM_GROUPS
    assert len(set(prompts)) == len(prompts)


def test_a_figure_of_what_was_measured() -> None:
    made = figure_of(
        "b1",
        "ours",
        0,
        latencies_s=[0.001 * n for n in range(1, 101)],
        first_tokens_s=[0.002, 0.004, 0.006],
        errors=1,
        seconds=2.0,
        cpu_s=0.05,
    )
    assert (made.requests, made.errors, made.cpu_us) == (100, 1, pytest.approx(500.0))
    assert (made.p50_us, made.p99_us) == (pytest.approx(50_500.0), pytest.approx(100_000.0))
    assert made.first_token_p50_us == pytest.approx(4000.0)
    nothing = figure_of("b1", "x", 0, latencies_s=[], first_tokens_s=[], errors=3, seconds=2.0, cpu_s=0.0)
    assert (nothing.requests, nothing.cpu_us, nothing.p50_us) == (0, 0.0, 0.0)


def test_summaries_are_medians_over_rounds() -> None:
    (one,) = summaries([figure("b128", "ours", n, cpu) for n, cpu in enumerate((640.0, 6400.0, 1280.0))])
    assert (one.cpu_us, one.cpu_us_per_chunk, one.engine_calls) == (1280.0, 1280.0 / CHUNKS, 0.0)


def test_all_calls_to_engines_are_summed_up() -> None:
    calls = {"/v1/chat/completions/render": 2.0, "/v1/chat/completions": 1.0}
    (one,) = summaries([msgspec.structs.replace(figure("c4k", "peer", 0, 1.0), engine_calls=calls)])
    assert one.engine_calls == 3.0
    assert json.loads(msgspec.json.encode(figure("c4k", "peer", 0, 1.0)))["engine_calls"] == {}


def test_a_verdict_compares_within_rounds() -> None:
    # The machine is ten times slower in the last round, for both: the ratio is not.
    figures = [
        *(figure("a32", "ours", n, cpu) for n, cpu in enumerate((40.0, 50.0, 400.0))),
        *(figure("a32", "vllm-router rr", n, cpu) for n, cpu in enumerate((50.0, 50.0, 500.0))),
    ]
    (verdict,) = judge(figures)
    assert verdict.value == pytest.approx(0.8) and verdict.is_met


def test_absolute_targets_and_differences_to_direct() -> None:
    figures = [
        figure("b128", "ours", 0, 9.0 * CHUNKS),
        figure("b128", DIRECT, 0, 0.0),
        figure("b1", "ours", 0, 1.0, first_token_p50_us=700.0),
        figure("b1", DIRECT, 0, 0.0, first_token_p50_us=100.0),
    ]
    chunk, first_token = judge(figures)
    assert (chunk.value, chunk.is_met) == (9.0, False)
    assert (first_token.value, first_token.is_met) == (600.0, True)


def test_a_relay_above_the_limit_says_that_nobody_could_meet_it() -> None:
    figures = [
        figure("b128", "ours", 0, 12.0 * CHUNKS),
        figure("b128", "relay in C", 0, 9.0 * CHUNKS),
        figure("b128", DIRECT, 0, 0.0),
        figure("a32", "ours", 0, 60.0),
        figure("a32", "relay in C", 0, 10.0),
        figure("a32", "relay in Python", 0, 20.0),
        figure("a32", "vllm-router rr", 0, 40.0),
    ]
    request, chunk = judge(figures)
    assert request.floors == {"relay in C": 0.25, "relay in Python": 0.5} and not request.is_out_of_reach
    assert chunk.floors == {"relay in C": 9.0} and chunk.is_out_of_reach and not chunk.is_met


def is_answered(case: str, port: int) -> bool:
    for seconds in (0.5, 1, 2, 4, 8, 16, 32):  # a busy machine needs longer
        load = Load(CASES[case], port)
        load.run(seconds)
        if load.latencies_s or load.errors:
            return not load.errors
    return False


def test_calls_to_engines_are_those_of_whole_requests(tmp_path: Path) -> None:
    """A relay passes on what it gets, so its engine gets one call for each request."""
    log = tmp_path / "engine.log"
    engine = Process([sys.executable, ENGINE], log)
    try:
        engine.wait_until(lambda: log.read_text().strip().isdigit(), 60.0, "engine")
        port = int(log.read_text())
        relay = Running(FLOORS[1], [f"http://127.0.0.1:{port}"], tmp_path / "relay.log")
        try:
            assert is_answered("c4k", relay.port)
            assert engine_calls(CASES["c4k"], relay.port, [port]) == {"/v1/chat/completions": 1.0}
        finally:
            relay.stop()
    finally:
        engine.stop()


@pytest.mark.parametrize("relay", FLOORS, ids=lambda relay: relay.name)
def test_relays_pass_requests_and_answers(relay: System, tmp_path: Path) -> None:
    if relay.name == "relay in C" and shutil.which("cc") is None:
        with pytest.raises(SystemFailed, match="no C compiler"):
            relay.command(free_port(), ["http://127.0.0.1:1"])
        return
    engine = Process([sys.executable, ENGINE, "--step-ms", "1"], tmp_path / "engine.log")
    try:
        engine.wait_until(lambda: (tmp_path / "engine.log").read_text().strip().isdigit(), 60.0, "engine")
        running = Running(relay, [f"http://127.0.0.1:{engine.log_tail().strip()}"], tmp_path / "relay.log")
        try:
            # Each is cut off in the middle of its last requests, and the next finds the relay alive.
            assert all(is_answered(name, running.port) for name in ("b128", "a32", "c32k"))
        finally:
            running.stop()
    finally:
        engine.stop()


def test_without_the_other_side_there_is_no_verdict() -> None:
    assert list(judge([figure("a32", "ours", 0, 1.0), figure("a32", "vllm-router rr", 1, 1.0)])) == []


def test_targets_name_systems_and_cases_that_exist() -> None:
    names = {system.name for system in (*OURS, *FLOORS, *itertools.chain(*PEERS.values()))} | {DIRECT}
    assert {target.other for target in TARGETS} <= names
    assert {target.case for target in TARGETS} <= set(CASES)
