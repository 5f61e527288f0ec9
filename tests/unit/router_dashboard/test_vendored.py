"""The chart library that ships is the one the lock file names."""

import json
from pathlib import Path

DASHBOARD = Path(__file__).resolve().parents[3] / "router" / "dashboard"


def test_the_vendored_chart_library_is_the_locked_one() -> None:
    wanted = json.loads((DASHBOARD / "package.json").read_text())["dependencies"]["uplot"]
    locked = json.loads((DASHBOARD / "package-lock.json").read_text())["packages"]["node_modules/uplot"]
    banner = (DASHBOARD / "static" / "uplot.js").read_text().splitlines()[0]
    assert locked["version"] == wanted and f"(v{wanted})" in banner
    assert "MIT" in (DASHBOARD / "static" / "uplot.LICENSE.txt").read_text()
