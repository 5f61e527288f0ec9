"""A private directory for the sockets of one store, and the removal of those that killed stores left."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from store_server.unix_socket import MAX_PATH_BYTES

_PREFIX = "mooncake-store-"
_MAX_PARENT_BYTES = MAX_PATH_BYTES - len(f"/{_PREFIX}xxxxxxxx/store.sock")


class RuntimeDir:
    """Mode 0700: who may enter it may map the pool. A lock, not a pid, tells whether its store lives, because
    stores in different containers may share the directory but not their pids.

    It lies in the temporary directory, or in /tmp where that one's path is too long for a socket."""

    def __init__(self, parent: Path | None = None) -> None:
        parent = parent or Path(tempfile.gettempdir())
        if len(os.fsencode(parent)) > _MAX_PARENT_BYTES:
            parent = Path("/tmp")
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        self._lock = _lock(self.path)
        remove_stale(parent)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)


def remove_stale(parent: Path) -> None:
    for path in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if path.stat().st_uid != os.getuid() or not (path / "lock").exists():
                continue
            lock = _lock(path)
            if lock is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)


def _lock(path: Path) -> int | None:
    """None when somebody else holds it."""
    fd = os.open(path / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd
