"""The SSD benchmark runs to its end and loses nothing; its figures are nobody's business here."""

import json
from pathlib import Path

import pytest

from benchmarks.ssd import main


@pytest.mark.slow
def test_it_measures_everything_and_cleans_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = tmp_path / "figures.json"
    sizes = ["--size", "256kb", "--total", "32mb", "--dram", "16mb", "--keys", "5000"]
    main([str(tmp_path), *sizes, "--json", str(result)])
    figures = json.loads(result.read_text())
    assert figures["rejected"] == figures["lost"] == 0
    assert all(figures[name] > 0 for name in figures if name not in ("rejected", "lost"))
    assert "rejected 0, lost 0" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [result]
