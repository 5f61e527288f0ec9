"""Child processes of the benchmark: started with a log file, watched, always ended by pid."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

STOP_TIMEOUT_S = 10.0


class SystemFailed(Exception):
    """A system under test cannot be measured; the others go on. The text says what to do about it."""


class Process:
    """A server (or client) process whose output goes to `log_path`."""

    def __init__(
        self,
        arguments: Sequence[str | Path],
        log_path: Path,
        *,
        environment: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self._log_path = log_path
        with open(log_path, "wb") as log:
            try:
                self._popen = subprocess.Popen(
                    [str(argument) for argument in arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **(environment or {})},
                    pass_fds=tuple(pass_fds),
                )
            except OSError as error:
                raise SystemFailed(f"cannot start {arguments[0]}: {error}") from error

    @property
    def pid(self) -> int:
        return self._popen.pid

    def wait_until(self, ready: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Poll `ready`; SystemFailed with the end of the log when the process ends or time is over."""
        deadline_s = time.monotonic() + timeout_s
        while not ready():
            if self._popen.poll() is not None:
                raise SystemFailed(f"{what} ended with status {self._popen.returncode}:\n{self.log_tail()}")
            if time.monotonic() > deadline_s:
                raise SystemFailed(f"{what} was not ready after {timeout_s:.0f} s:\n{self.log_tail()}")
            time.sleep(0.05)

    def log_tail(self) -> str:
        lines = self._log_path.read_text(errors="replace").splitlines()
        return "\n".join(lines[-15:])

    def stop(self, stop_signal: int = signal.SIGTERM) -> None:
        if self._popen.poll() is None:
            self._popen.send_signal(stop_signal)
        self.wait_end()

    def wait_end(self) -> None:
        """Give it time to end by itself, then kill it."""
        try:
            self._popen.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()


def free_port() -> int:
    """A TCP port that was free a moment ago, for servers that cannot choose one themselves.

    Below those which the kernel gives to connections (from 32768 on): servers take long until they listen, or
    are killed and listen again, and nobody is to get it meanwhile.
    """
    while True:
        port = random.randrange(15_000, 30_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def accepts(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process so far, to the nanosecond; 0 when it is gone.

    The clock id is that of clock_getcpuclockid(3), which Python does not offer; /proc counts in ticks of
    10 ms, longer than most phases here.
    """
    with contextlib.suppress(OSError):
        return time.clock_gettime((~pid << 3) | 2)
    return 0.0
