"""Two stores and one path of a Unix socket: nobody loses it to another."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvcore.errors import ConfigError
from store_server.unix_socket import SocketFile, check_socket_path
from tests.integration.store_harness import StartStore, StoreProcess
from tests.integration.store_harness import short_dir as short_dir
from tests.integration.store_harness import start_store as start_store


def listening(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    return listener


def start_another(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "store_server.cli", "serve", "--admin-port", "-1"]
    command += ["--pool-size-bytes", "64mb", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_store_does_not_take_the_socket_of_another(start_store: StartStore, short_dir: Path) -> None:
    path = short_dir / "kv.sock"
    store = start_store("--unix-path", str(path))
    # The same configuration once more, and one that differs in its port alone.
    for port in (str(store.ready["port"]), "0"):
        other = start_another("--port", port, "--unix-path", str(path))
        assert other.returncode == 1
        assert "in use" in other.stderr or f"another process listens on {path}" in other.stderr
        assert "Traceback" not in other.stderr
    store.connect(unix=True)


def test_a_store_that_stops_leaves_the_socket_of_its_successor(
    start_store: StartStore, short_dir: Path
) -> None:
    path = short_dir / "kv.sock"
    first: StoreProcess = start_store("--unix-path", str(path))
    path.unlink()
    with listening(path):
        first.process.send_signal(signal.SIGTERM)
        assert first.process.wait(30) == 0
        assert path.is_socket()


def test_what_a_killed_store_has_left_is_taken_over(start_store: StartStore, short_dir: Path) -> None:
    path = short_dir / "kv.sock"
    first: StoreProcess = start_store("--unix-path", str(path))
    first.process.kill()
    first.process.wait()
    assert path.is_socket()
    start_store("--unix-path", str(path)).connect(unix=True)


def test_paths_that_cannot_be_are_named(short_dir: Path) -> None:
    check_socket_path(short_dir / "free")
    for path, complaint in (
        (short_dir / "none" / "kv.sock", "no directory"),
        (short_dir / ("x" * 120), "longer than 107 bytes"),
        (short_dir, "is not a socket"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            check_socket_path(path)


def test_only_the_file_that_was_bound_is_removed(short_dir: Path) -> None:
    path = short_dir / "kv.sock"
    with listening(path):
        mine = SocketFile(path)
    os.link(path, short_dir / "keep")  # so that its inode is not given to the next
    path.unlink()
    with listening(path):
        mine.remove()
        assert path.exists()
        theirs = SocketFile(path)
    theirs.remove()
    theirs.remove()
    assert not path.exists()
