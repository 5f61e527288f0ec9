"""Packages that a few tests need beside those of their environment: downloaded once, shared by clones."""

import fcntl
import shutil
import subprocess
import sys
from pathlib import Path

from suite_cache import suite_cache


def unpacked(name: str, *requirements: str) -> Path:
    """A folder for PYTHONPATH: `requirements` without their dependencies, which the environment has."""
    target = suite_cache() / name
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f"{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            unfinished = target.with_name(f"{target.name}.unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
            subprocess.run([*pip, "--target", str(unfinished), *requirements], check=True, timeout=1800)
            unfinished.rename(target)
    return target


def mooncake_transfer_engine() -> Path:
    """Mooncake's own transfer engine, for engines that move KV by it; its TCP needs neither CUDA nor RDMA."""
    requirement = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
    return unpacked(requirement, requirement)


# Of every engine process that uses it.
MOONCAKE_ENVIRONMENT = {"MC_FORCE_TCP": "1", "MOONCAKE_PROTOCOL": "tcp", "MC_LOG_LEVEL": "WARNING"}
