"""What scripts/test says of arguments it cannot use, before it makes anything."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    "arguments",
    [
        ["tests/no/such"],
        ["--fast", "tests/no/such"],
        ["tests/unit/kvcore", "tests/no/such"],
        ["-x", "tests/no/such"],
        ["-k", "router", "tests/no/such"],  # router is a folder too
        ["--maxfail=1", "tests/no/such"],
        ["--timeout", "60", "tests/no/such"],
    ],
)
def test_a_path_that_is_not_there_is_named(arguments: list[str]) -> None:
    done = subprocess.run([ROOT / "scripts" / "test", *arguments], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "test: there is no tests/no/such\n")
