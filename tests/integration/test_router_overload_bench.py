"""A few seconds of benchmarks/router_overload.py: stand-in engines, a real router, too many requests."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    # One attempt: what is asserted holds on a busy machine, too.
    command = [sys.executable, "-m", "benchmarks.router_overload", "--attempts", "1", *arguments]
    environment = {**os.environ, "PYTHONPATH": "benchmarks"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_every_policy_is_offered_the_same_and_early_ones_prefill_nothing_in_vain(tmp_path: Path) -> None:
    # An engine that takes 50 ms a prompt and holds few streams, so that seconds are enough to overload it.
    profile = tmp_path / "profile.toml"
    profile.write_text(
        "[scheduling.prefill_model]\nconstant_ms = 0.0\nper_token_ms = 0.025\nper_token2_ms = 0.0\n"
        "[scheduling.decode_model]\nconstant_ms = 2.0\nper_request_ms = 0.5\nper_kv_token_ms = 0.0\n"
    )
    slos = ("--ttft-slo-ms", "2000", "--tbt-slo-ms", "6", "--load", "3", "--seconds", "4")
    done = run("--profile", str(profile), *slos, "--json", str(tmp_path / "figures.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    totals = json.loads((tmp_path / "figures.json").read_text())["totals"]
    assert [one["admission"] for one in totals] == ["baseline", "early", "predictive", "predictive_request"]
    assert len({one["offered"] for one in totals}) == 1
    for one in totals:
        assert one["failures"] == []
        assert one["answered"] > 0
        assert one["answered"] + sum(one["refused"].values()) == one["offered"]
    assert any(one["refused"] for one in totals)
    assert "prefilled in vain" in done.stdout


def test_an_engine_that_cannot_meet_its_slo_is_told_before_anything_runs() -> None:
    done = run("--tbt-slo-ms", "1")
    assert done.returncode == 2
    assert "raise --tbt-slo-ms" in done.stderr


def test_a_trace_is_replayed_to_router_and_simulator(tmp_path: Path) -> None:
    trace = ROOT / "tests" / "data" / "synthetic_trace_head.jsonl"
    figures = tmp_path / "figures.json"
    cluster = ("--prefill-nodes", "2", "--decode-nodes", "2", "--speed", "20", "--compress", "40")
    done = run("--trace", str(trace), "--rounds", "2", "--quick", *cluster, "--json", str(figures))
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(figures.read_text())
    for measured, simulated in zip(document["totals"], document["simulated_totals"], strict=True):
        assert measured["admission"] == simulated["admission"]
        assert measured["offered"] == simulated["offered"] > 0
        for one in (measured, simulated):
            assert one["answered"] + sum(one["refused"].values()) == one["offered"]
            assert one["cached_share"] > 0
        assert measured["refused"] and simulated["refused"]
    assert "Refused more in a round" in done.stdout


def test_what_cannot_be_replayed_is_said(tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("timestamp,input_length,output_length\n0,10,5\n1000,20,5\n")
    for arguments, message in (
        (("--trace", str(tmp_path / "absent.jsonl")), "cannot be read"),
        (("--trace", str(lengths)), "without hash_ids"),
        (("--trace", str(lengths), "--speed", "0"), "must be positive"),
        (("--trace", str(lengths), "--rounds", "-1"), "must be at least 1"),
    ):
        done = run(*arguments)
        assert done.returncode == 2
        assert message in done.stderr and "Traceback" not in done.stderr
