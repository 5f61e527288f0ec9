"""A real mooncake-store in a process of its own, on ports it chooses itself."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

START_S = 120.0
# Of clients in tests that are about something else than deadlines: test machines are slow.
PATIENT = dict.fromkeys(("timeout_ms", "connect_timeout_ms", "silence_ms"), 60_000.0)


def hold_port(port: int = 0) -> socket.socket:
    """Nobody listens on it and the kernel gives it to nobody, but a store that is told it can take it."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", port))
    return held


class StoreProcess:
    """Keeps its port over kills and restarts. `flags` are those of `mooncake-store serve`; `enter` are words
    in front of its command, which lead to where it runs."""

    def __init__(
        self,
        folder: Path,
        *flags: str,
        pool: str = "256mb",
        host: str = "127.0.0.1",
        enter: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self.host = host
        self._enter = list(enter)
        self.port = 0
        self.unix_address = ""
        self._flags = ["--pool-size-bytes", pool, "--admin-port", "-1", "--log-level", "warning", *flags]
        self._process: subprocess.Popen[bytes] | None = None
        self._port_held: socket.socket | None = None  # while no store has it
        folder.mkdir(parents=True, exist_ok=True)
        self._runtime = tempfile.mkdtemp(prefix="ms-")  # pytest's own are too long for a socket's path
        weakref.finalize(self, shutil.rmtree, self._runtime, ignore_errors=True)

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> "StoreProcess":
        ready_file = self.folder / "ready.json"
        ready_file.unlink(missing_ok=True)
        command = [*self._enter, sys.executable, "-m", "store_server.cli", "serve"]
        command += ["--ready-file", str(ready_file), "--host", self.host, "--port", str(self.port)]
        command += self._flags
        with (self.folder / "log.txt").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, "TMPDIR": self._runtime}
            )
        deadline = time.monotonic() + START_S
        while not ready_file.exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise AssertionError(f"the store did not start:\n{(self.folder / 'log.txt').read_text()}")
            time.sleep(0.01)
        ready = json.loads(ready_file.read_text())
        self.port, self.unix_address = ready["port"], ready["unix_address"]
        self._let_go_of_port()
        return self

    def stop(self) -> int:
        """Gracefully; returns the exit status."""
        return self._end(signal.SIGTERM)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def _end(self, number: int) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        process.send_signal(number)
        try:
            status = process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        if self.port and self.host == "127.0.0.1":
            self._port_held = hold_port(self.port)
            weakref.finalize(self, self._port_held.close)
        return status

    def _let_go_of_port(self) -> None:
        if self._port_held is not None:
            self._port_held.close()
            self._port_held = None
