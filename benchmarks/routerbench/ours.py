"""How our router is started: from the clone, or with its hot path compiled."""

import functools
import subprocess
import sys
from pathlib import Path

from storebench.processes import SystemFailed

_ROOT = Path(__file__).resolve().parents[2]
_COMPILER = _ROOT / "scripts" / "compiled.py"


def router_command(*, compiled: bool) -> list[str]:
    """Without any flags. The first `compiled` one may take minutes; SystemFailed when it cannot be made."""
    command = [sys.executable, "-m", "router.cli"]
    # Safe path: the current directory must not come before it.
    return ["env", f"PYTHONPATH={_compiled_tree()}", "PYTHONSAFEPATH=1", *command] if compiled else command


def package_folder(*, compiled: bool) -> Path:
    """The folder to import the router from."""
    return Path(_compiled_tree()) if compiled else _ROOT


@functools.cache
def _compiled_tree() -> str:
    command = [sys.executable, str(_COMPILER)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemFailed("the router's hot path cannot be compiled (see above)")
    return done.stdout.strip()
