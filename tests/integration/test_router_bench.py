"""The router's benchmark runs, for a moment and without peers, and its files hold what it measured."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # it may compile the router first

ROOT = Path(__file__).resolve().parents[2]


def test_it_measures_ours_and_writes_its_files(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "router.py"),
        "--vs",
        "none",
        "--cases",
        "a1,b1,pd32",
    ]
    files = ["--json", str(tmp_path / "figures.json"), "--plot", str(tmp_path / "figures.png")]
    brief = ["--rounds", "1", "--seconds", "0.5"]
    done = subprocess.run([*command, *brief, *files], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / "figures.json").read_text())
    measured = {(figure["case"], figure["system"]) for figure in document["figures"]}
    ours = {"ours round_robin", "ours", "ours in plain Python"}
    systems = {"direct", *ours, "relay in Python", "relay in C"} - set(document["left_out"])
    assert measured == {
        *((case, system) for case in ("a1", "b1") for system in systems),
        ("pd32", "ours split"),
    }
    for figure in document["figures"]:
        assert figure["requests"] > 0 and figure["errors"] == 0
        assert (figure["cpu_us"] > 0) == (figure["system"] != "direct")
    assert [target["case"] for target in document["targets"]] == ["b1"]
    assert "relay in Python" in document["targets"][0]["floors"]
    assert set(document["left_out"]) <= {"relay in C"}
    assert (tmp_path / "figures.png").read_bytes().startswith(b"\x89PNG")
    assert "first token later than direct" in done.stdout
