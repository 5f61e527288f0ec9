"""Peers are installed on demand, into a cache outside the clone, never into the caller's environment."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from storebench.processes import SystemFailed

INSTALL_TIMEOUT_S = 1800
_COMPLETE = ".complete"


def cache_dir() -> Path:
    """The suite's cache (as in scripts/): MOONCAKE_SUITE_CACHE, else the user's cache directory."""
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    suite_cache = os.environ.get("MOONCAKE_SUITE_CACHE") or user_cache / "mooncake-kv-suite"
    return Path(suite_cache) / "bench-peers"


def package_dir(name: str, requirement: str) -> Path:
    """Directory for PYTHONPATH that holds just this package, without its dependencies."""
    target = cache_dir() / f"{name}-py{sys.version_info.major}{sys.version_info.minor}"
    if not (target / _COMPLETE).exists():
        _announce(name, target)
        _run(_pip(sys.executable, "--upgrade", "--no-deps", "--target", str(target), requirement))
        (target / _COMPLETE).touch()
    return target


def venv_python(name: str, pip_arguments: Sequence[Sequence[str]]) -> Path:
    """Interpreter of a venv of its own; each entry holds the arguments of one `pip install`."""
    target = cache_dir() / name
    python = target / "bin" / "python"
    if not (target / _COMPLETE).exists():
        _announce(name, target)
        _run([sys.executable, "-m", "venv", "--clear", str(target)])
        for arguments in pip_arguments:
            _run(_pip(str(python), *arguments))
        (target / _COMPLETE).touch()
    return python


def _announce(name: str, target: Path) -> None:
    print(f"installing {name} into {target} (once)", file=sys.stderr, flush=True)


def _pip(python: str, *arguments: str) -> list[str]:
    return [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SystemFailed(f"installation failed: {error}") from error
    if done.returncode:
        tail = "\n".join(done.stderr.splitlines()[-10:])
        raise SystemFailed(f"installation failed ({' '.join(command)}):\n{tail}")
