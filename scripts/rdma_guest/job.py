"""What one guest is told and what it says: a folder that both sides see."""

import os
import shlex
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

_GUEST_FILES = Path(__file__).resolve().parent / "guest"
_KEPT = ("HOME", "LANG", "LC_ALL", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE", "CI", "TERM")
PYTHON_FOLDER = "/usr/lib/rdma-vm/python"
"""Holds pyverbs: apart from Debian's other Python packages, which would hide those of a venv."""


def init_program() -> bytes:
    return (_GUEST_FILES / "init").read_bytes()


def guest_environment(
    backend: str, environ: Mapping[str, str], extra: Sequence[tuple[str, str]]
) -> dict[str, str]:
    """What the command sees. It learns by RDMA_VM that it runs in a guest, and of which kind."""
    kept = {name: environ[name] for name in _KEPT if name in environ}
    kept["PATH"] = f"/run/bin:{environ.get('PATH', '/usr/bin:/bin')}:/usr/sbin:/sbin"
    kept["PYTHONPATH"] = ":".join(filter(None, [environ.get("PYTHONPATH"), PYTHON_FOLDER]))
    kept["PYTHONUNBUFFERED"] = "1"
    kept["RDMA_VM"] = backend
    return {**kept, **dict(extra)}


class Job:
    """The folder of one run; `close` removes it."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="rdma-vm-"))
        self.output = self.folder / "out"
        self.console = self.folder / "console"

    def write(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        share: Path,
        layer: Path,
        network: str,
        folder: Path,
    ) -> None:
        for name in ("stage2", "rdma-fault", "rdma-routes"):
            shutil.copy(_GUEST_FILES / name, self.folder / name)
        settings = {"SHARE": share, "CWD": folder, "LAYER": layer, "NET": network}
        self._put("env", "".join(f"{key}={shlex.quote(str(value))}\n" for key, value in settings.items()))
        self._put(
            "userenv", "".join(f"export {key}={shlex.quote(value)}\n" for key, value in environment.items())
        )
        self._put("command", shlex.join(command) + "\n")
        self._put("out", "")

    def status(self) -> int | None:
        """The command's exit status, once it has ended."""
        try:
            text = (self.folder / "rc").read_text().strip()
        except FileNotFoundError:
            return None
        return int(text) if text else None

    def complaints(self) -> str:
        """What went wrong while the guest made its network; empty when all is well."""
        return self._text("setup.log")

    def diagnosis(self, limit: int = 4000) -> str:
        return self._text("console")[-limit:] + self._text("setup.log") + self._text("meminfo")

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _put(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def _text(self, name: str) -> str:
        path = self.folder / name
        return path.read_text(errors="replace") if path.exists() else ""


def memory_folder(needed_bytes: int) -> str:
    """Where a User-Mode-Linux kernel keeps its RAM, a file that grows as the guest touches it. Containers
    often have a /dev/shm of 64 MB, and writing beyond it kills the kernel."""
    try:
        room = os.statvfs("/dev/shm")
    except OSError:
        return tempfile.gettempdir()
    executable = not room.f_flag & os.ST_NOEXEC
    enough = room.f_bavail * room.f_frsize >= needed_bytes
    return "/dev/shm" if executable and enough else tempfile.gettempdir()
