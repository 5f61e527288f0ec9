"""The file of a store's Unix socket: no living store loses it to another, and only our own is removed.

uvloop (0.23) removes whatever socket lies at a path before it binds there, also one that another store
listens on, and that store would in turn remove ours when it stops.
"""

import contextlib
import errno
import os
import socket
import stat
from pathlib import Path

from kvcore.errors import ConfigError

MAX_PATH_BYTES = 107
"""Of the path of a Unix socket (unix(7))."""
_ANSWER_TIMEOUT_S = 2.0


def check_socket_path(path: Path) -> None:
    """ConfigError when no socket can be made there; OSError when another process listens there. What a store
    that was killed has left may stay."""
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise ConfigError(f"unix_path {path} is longer than {MAX_PATH_BYTES} bytes: choose a shorter one")
    if not path.parent.is_dir():
        raise ConfigError(f"unix_path {path}: there is no directory {path.parent}; make it first")
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"unix_path {path} exists and is not a socket: choose another one, or remove it")
    with socket.socket(socket.AF_UNIX) as caller:
        caller.settimeout(_ANSWER_TIMEOUT_S)
        try:
            caller.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return
        except TimeoutError:
            pass  # alive, with a full backlog
    raise OSError(errno.EADDRINUSE, f"another process listens on {path}")


class SocketFile:
    """The file of a socket that has just been bound."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._identity = self._look()

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            if self._look() == self._identity:
                self._path.unlink()

    def _look(self) -> tuple[int, int]:
        found = self._path.stat()
        return found.st_dev, found.st_ino
