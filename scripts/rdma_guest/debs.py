"""Debian packages, downloaded and unpacked into the cache; nothing is installed, so no root is needed."""

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rdma_guest.errors import SetupError, say

_MERGED = ("bin", "sbin", "lib", "lib64")


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Waits for other processes that make the same thing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def unpacked(
    cache: Path, name: str, packages: Sequence[str], finish: Callable[[Path], None] | None = None
) -> Path:
    """The folder with the packages' files, made once; `finish` changes it before anybody sees it.

    SetupError when apt-get is not there or does not know the packages.
    """
    digest = hashlib.sha256(" ".join(sorted(packages)).encode()).hexdigest()[:12]
    folder = cache / f"{name}-{digest}"
    with locked(cache / f"{name}.lock"):
        if not folder.exists():
            say(f"fetching {len(packages)} packages for {name}")
            with tempfile.TemporaryDirectory(dir=cache, prefix="new-") as work:
                files = _download(packages, Path(work), cache)
                tree = Path(work) / "tree"
                tree.mkdir()
                for file in files:
                    _run(["dpkg", "-x", str(file), str(tree)])
                if finish is not None:
                    finish(tree)
                tree.rename(folder)
    return folder


def missing_closure(packages: Sequence[str]) -> list[str]:
    """`packages`, and what they need beyond what the host has installed: the guest sees the host's files."""
    answer = subprocess.run(
        ["apt-get", "install", "--simulate", "--no-install-recommends", *packages],
        capture_output=True,
        text=True,
        env={**os.environ, "LC_ALL": "C"},
    )
    return sorted({*packages, *installed_by(answer.stdout)})


def installed_by(simulation: str) -> list[str]:
    """The packages that `apt-get install --simulate` says it would install."""
    lines = (line.split() for line in simulation.splitlines())
    return [words[1].split(":")[0] for words in lines if len(words) > 1 and words[0] == "Inst"]


def merge(tree: Path) -> None:
    """Packages of before the merge of /usr have real /bin, /lib...; on the host these are links into usr/."""
    for name in _MERGED:
        folder = tree / name
        if folder.is_dir() and not folder.is_symlink():
            (tree / "usr" / name).mkdir(parents=True, exist_ok=True)
            _run(["cp", "-a", f"{folder}/.", str(tree / "usr" / name)])
            shutil.rmtree(folder)


def update(cache: Path) -> None:
    """Renews apt's lists, which takes root. One at a time: scripts/lib.sh takes the same lock."""
    if os.geteuid() != 0:
        raise SetupError("apt's lists are missing or old; run `sudo apt-get update` and repeat")
    with locked(cache.parent / "apt.lock"):
        _run(["apt-get", "-q", "update"])


def _download(packages: Sequence[str], folder: Path, cache: Path) -> list[Path]:
    if shutil.which("apt-get") is None:
        raise SetupError(
            f"there is no apt-get to fetch {', '.join(packages)} with; the guest needs Debian 12"
        )
    folder.chmod(0o777)  # apt downloads as a user of its own
    try:
        _run(["apt-get", "-q", "download", *packages], cwd=folder)
    except SetupError:
        update(cache)
        _run(["apt-get", "-q", "download", *packages], cwd=folder)
    return sorted(folder.glob("*.deb"))


def _run(command: Sequence[str], cwd: Path | None = None) -> None:
    done = subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SetupError(f"`{' '.join(command)}` failed:\n{done.stdout[-2000:].strip()}")
