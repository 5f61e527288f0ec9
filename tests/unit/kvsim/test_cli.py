"""The command, as a user types it."""

import json
import re
from pathlib import Path

import pytest

from kvsim.cli import main
from kvsim.recorded import read_lines
from router.core.record import Arrival

ROOT = Path(__file__).parents[3]
HEAD = str(ROOT / "tests" / "data" / "synthetic_trace_head.jsonl")
CONFIG = str(ROOT / "configs" / "sim" / "mooncake.toml")
SHORT = ["--trace", HEAD, "--set", "trace.end_s=30", "--json"]


def summaries(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def test_run_prints_a_table_and_writes_a_report_that_needs_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "run.record"
    arguments = ["run", CONFIG, "--trace", HEAD, "--out", str(tmp_path / "out"), "--record", str(record)]
    assert main(arguments) == 0
    assert "8P+8D" in capsys.readouterr().out
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("data:image/png;base64,") >= 4
    assert not re.findall(r'(?:src|href)="(?!data:)', page)
    for png in (tmp_path / "out").glob("*.png"):
        assert png.read_bytes().startswith(b"\x89PNG")
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["runs"][0]["summary"]["num_requests"] == 500
    assert sum(isinstance(line, Arrival) for line in read_lines(record)) == 500


def test_compare_runs_the_papers_baselines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(ROOT / "configs" / "sim" / "baselines.toml"), *SHORT]) == 0
    names = [run["name"] for run in summaries(capsys)]
    assert names == ["ours, 8P+8D", "vLLM", "vLLM, prefix caching", "vLLM, chunked prefill"]


def test_a_trace_may_lie_beside_the_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = Path(HEAD).read_text().splitlines(keepends=True)[:20]
    (tmp_path / "few.jsonl").write_text("".join(lines))
    (tmp_path / "run.toml").write_text('trace.path = "few.jsonl"\n')
    (tmp_path / "runs.toml").write_text('[base]\ntrace.path = "few.jsonl"\n[[runs]]\nname = "a"\n')
    for command, file in (("run", "run.toml"), ("compare", "runs.toml")):
        assert main([command, str(tmp_path / file), "--json"]) == 0
        assert [run["num_requests"] for run in summaries(capsys)] == [20]


def test_sweep_runs_every_combination(capsys: pytest.CaptureFixture[str]) -> None:
    vary = ["--vary", "trace.speed=1,2", "--vary", "cluster.decode_nodes=2,4,8", "--processes", "1"]
    assert main(["sweep", CONFIG, *SHORT, *vary]) == 0
    runs = summaries(capsys)
    assert len({run["name"] for run in runs}) == 6
    assert [run["num_nodes"] for run in runs] == [10, 12, 16] * 2


def test_settings_of_a_sweep_can_change_together(capsys: pytest.CaptureFixture[str]) -> None:
    vary = ["--vary", "cluster.prefill_nodes:cluster.decode_nodes=4:12,8:8", "--processes", "1"]
    assert main(["sweep", CONFIG, *SHORT, *vary]) == 0
    runs = summaries(capsys)
    assert [run["num_nodes"] for run in runs] == [16, 16]
    assert runs[0]["prefill_utilisation"] != runs[1]["prefill_utilisation"]


def test_plan_finds_a_cluster_that_keeps_the_slo_and_no_smaller_one_tried_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", CONFIG, *SHORT, "--processes", "1", "--max-nodes", "24"]) == 0
    runs = summaries(capsys)
    smallest = min(int(str(run["num_nodes"])) for run in runs if float(str(run["good_share"])) >= 0.95)
    assert 2 < smallest < 24
    assert any(run["num_nodes"] == smallest - 1 for run in runs)


def test_plan_says_when_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", CONFIG, *SHORT, "--processes", "1", "--max-nodes", "2"]) == 2
    assert "not even 2 nodes keep the SLO" in capsys.readouterr().err


def test_hit_rates_by_capacity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["hit-rate", HEAD, "--capacities", "1000,100000", "--policies", "lru,sieve"]
    assert main([*command, "--out", str(tmp_path / "out")]) == 0
    assert len(json.loads((tmp_path / "out" / "hit_rates.json").read_text())["hit_rates"]) == 4
    assert (tmp_path / "out" / "hit_rate.png").read_bytes().startswith(b"\x89PNG")
    assert "sieve" in capsys.readouterr().out
    assert main(["hit-rate", HEAD, "--capacities", "1000,100000", "--json"]) == 0
    small, large = summaries(capsys)
    assert int(str(small["hit_blocks"])) < int(str(large["hit_blocks"]))


@pytest.mark.parametrize(
    "file", sorted((ROOT / "configs" / "sim").glob("*.toml")), ids=lambda file: file.stem
)
def test_every_configuration_that_is_shipped_runs(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    is_comparison = "[[runs]]" in file.read_text()
    command = ["compare", "--processes", "1"] if is_comparison else ["run"]
    assert main([*command, str(file), *SHORT]) == 0
    assert all(run["num_requests"] for run in summaries(capsys))


def test_a_figure_prints_its_rows_and_writes_its_plots(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    traces = ["--conversation", HEAD, "--synthetic", HEAD, "--end-s", "40", "--processes", "1"]
    status = main(["paper", "overload", *traces, "--out", str(tmp_path)])
    captured = capsys.readouterr()
    assert "predictive: requests rejected" in captured.out
    # So short a trace need not show the shape; a shape that is missed must be told.
    assert (status == 2) == ("MISSED" in captured.out) == ("did not come out" in captured.err)
    assert (tmp_path / "overload.json").exists() and (tmp_path / "overload_early.png").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "nowhere.toml"], "nowhere.toml: cannot be read"),
        (["run", CONFIG], r"either trace\.path or a \[synthetic\] table"),
        (["run", CONFIG, "--trace", "nowhere.jsonl"], "nowhere.jsonl: cannot be read"),
        (["run", CONFIG, "--trace", HEAD, "--set", "cluster.nodes=3"], "unknown key 'nodes'"),
        (["run", CONFIG, "--trace", HEAD, "--set", "seed"], "write NAME=VALUE"),
        (["compare", CONFIG, "--trace", HEAD], r"has a \[base\] table and \[\[runs\]\]"),
        (["run", CONFIG, "--trace", HEAD, "--set", "cluster.kind=mixed"], r"one of disaggregated, coupled"),
        (["run", CONFIG, "--trace", HEAD, "--set", "trace.speed=inf"], "Expected `float` <= 1000"),
        (["run", CONFIG, "--trace", HEAD, "--record", "/nowhere/x.record"], "--record .*: cannot be written"),
        (["run", CONFIG, "--trace", HEAD, "--out", CONFIG], "--out .*: no such directory can be made"),
        (["sweep", CONFIG, "--trace", HEAD, "--vary", "seed:sample_ms=1"], "as many values as names"),
        (["hit-rate", HEAD, "--policies", "fifo"], "no eviction policy 'fifo'"),
        (["hit-rate", "nowhere.record"], "nowhere.record: cannot be read"),
    ],
)
def test_mistakes_are_told_in_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err.strip()
    assert re.search(words, error) and "\n" not in error


@pytest.mark.parametrize("text", ["runs = [3]\n", 'base = 3\n[[runs]]\nname = "a"\n', "runs = []\n"])
def test_a_comparison_of_something_else_is_refused(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(text)
    assert main(["compare", str(file), "--trace", HEAD]) == 2
    assert "bad.toml: a comparison has a [base] table" in capsys.readouterr().err


def test_hit_rates_need_hashes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "lengths.csv"
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,4808,10\n")
    assert main(["hit-rate", str(file)]) == 2
    assert "has no hash_ids" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["hit-rate", HEAD, "--capacities", "10,0"], "'0' is no positive whole number"),
        (["hit-rate", HEAD, "--warmup-share", "2"], "'2' is no share"),
        (["plan", CONFIG, "--good-share", "95"], "'95' is no share"),
        (["sweep", CONFIG, "--vary", "seed=1,2", "--processes", "-3"], "'-3' is no positive whole number"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert words in capsys.readouterr().err
