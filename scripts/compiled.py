"""Builds the package with the router's hot path compiled (setup.py), prints the folder it lies in.

    PYTHONSAFEPATH=1 PYTHONPATH=$(python scripts/compiled.py) python -m router.cli ...

Built once for each state of the sources, in a minute or two, into the suite's cache. It needs a C compiler,
and mypy and setuptools beside the package's own requirements (scripts/test makes an environment with them).
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import mypy.version
from suite_cache import suite_cache

_ROOT = Path(__file__).resolve().parents[1]
_PACKAGES = ("kvcore", "kvsim", "mooncake_connector", "router", "sglang_hicache_backend", "store_server")
_FILES = ("LICENSE", "README.md", "pyproject.toml", "setup.py")
_KEPT_S = 3 * 24 * 3600.0  # other builds, since they were last used
_TIMEOUT_S = 1800


def main() -> int:
    """1 when it cannot be compiled."""
    cache = suite_cache()
    target = cache / f"compiled-{_state()}"
    if not target.exists():
        print(
            f"compiling the router's hot path into {target} (once, a minute or two)",
            file=sys.stderr,
            flush=True,
        )
        cache.mkdir(parents=True, exist_ok=True)
        _drop_old(cache)
        with tempfile.TemporaryDirectory(prefix="compiling-", dir=cache) as work:
            error = _build(Path(work))
            if error:
                print(error, file=sys.stderr)
                return 1
            try:
                (Path(work) / "built").rename(target)
            except OSError:
                if not target.exists():  # else somebody else was faster
                    raise
    os.utime(target)
    print(target)
    return 0


def _build(work: Path) -> str:
    """Into work/built; what went wrong, or nothing. mypyc writes beside the sources, so they are copied."""
    source = work / "source"
    source.mkdir()
    for package in _PACKAGES:
        shutil.copytree(
            _ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__", "*.so")
        )
    for name in _FILES:
        shutil.copy(_ROOT / name, source)
    command = [sys.executable, "setup.py", "--quiet", "build", "--build-lib", str(work / "built")]
    environment = {**os.environ, "MOONCAKE_COMPILE": "1"}
    done = subprocess.run(
        [*command, "--build-temp", str(work / "objects")],
        cwd=source,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    return "\n".join(done.stdout.splitlines()[-30:]) if done.returncode else ""


def _state() -> str:
    """Of all that the build depends on."""
    found = hashlib.sha256(f"{sys.version} {mypy.version.__version__}".encode())
    paths = [path for package in _PACKAGES for path in (_ROOT / package).rglob("*.py")]
    for path in sorted([*paths, *(_ROOT / name for name in _FILES)]):
        found.update(str(path.relative_to(_ROOT)).encode())
        found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()[:16]


def _drop_old(cache: Path) -> None:
    for folder in cache.glob("compiled-*"):
        if time.time() - folder.stat().st_mtime > _KEPT_S:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
