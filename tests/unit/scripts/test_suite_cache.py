"""Shell and Python look for what is made once in the same folder."""

import os
import subprocess
from pathlib import Path

import pytest
from suite_cache import suite_cache

LIBRARY = Path(__file__).resolve().parents[3] / "scripts" / "lib.sh"


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"XDG_CACHE_HOME": "/of/the/user"},
        {"MOONCAKE_SUITE_CACHE": "/our/own", "XDG_CACHE_HOME": "/of/the/user"},
        {"MOONCAKE_SUITE_CACHE": "", "XDG_CACHE_HOME": ""},
    ],
)
def test_shell_and_python_agree(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MOONCAKE_SUITE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/of/nobody", **variables}.items():
        monkeypatch.setenv(name, value)
    command = ["bash", "-c", 'source "$1"; printf %s "$SUITE_CACHE"', "bash", str(LIBRARY)]
    done = subprocess.run(command, env=dict(os.environ), stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == str(suite_cache())
