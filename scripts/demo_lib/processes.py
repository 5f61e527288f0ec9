"""Processes of the demo: each with a log file, waited for, and ended by process id whatever happens."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

STOP_GRACE_S = 20.0
POLL_S = 0.2
PORTS = range(20_000, 32_000)


class DemoError(Exception):
    """Something the demo started did not do its part; the message says what and where to look."""


class Running(NamedTuple):
    name: str
    process: "subprocess.Popen[bytes]"
    log: Path


def free_ports(count: int) -> list[int]:
    """TCP ports on 127.0.0.1 that are free now, all different.

    From below the range of outgoing connections: a minute passes until the last process of the demo listens,
    and by then an ephemeral port would often be taken.
    """
    found: list[int] = []
    with contextlib.ExitStack() as probes:
        for port in random.sample(PORTS, len(PORTS)):
            probe = probes.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                found.append(port)
            if len(found) == count:
                return found
    raise DemoError(f"no {count} free ports on 127.0.0.1 in {PORTS}")


class Processes:
    """A context manager: leaving it ends everything, last started first, unless `keep` was called."""

    def __init__(self, log_dir: Path) -> None:
        self.log_dir = log_dir
        self.running: list[Running] = []
        self._keep = False

    def __enter__(self) -> "Processes":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None or not self._keep:
            self.stop_all()

    def keep(self) -> None:
        self._keep = True

    def start(self, name: str, command: Sequence[str], env: Mapping[str, str]) -> Running:
        log = self.log_dir / f"{name}.log"
        with log.open("wb") as output:
            # A session of its own: Ctrl-C reaches the demo alone, which then ends all of them in order, and
            # the session's group still names the workers of an engine that died without ending them.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **env},
                start_new_session=True,
            )
        running = Running(name, process, log)
        self.running.append(running)
        return running

    def check_alive(self) -> None:
        for running in self.running:
            code = running.process.poll()
            if code is not None:
                raise DemoError(f"{running.name} ended with exit status {code}:\n{tail(running.log)}")

    def wait_until_ready(
        self, urls: Mapping[str, str], timeout_s: float, on_ready: Callable[[str], None]
    ) -> None:
        """Until GET of every url (by process name) answers 200; DemoError when one dies or time is over."""
        deadline = time.monotonic() + timeout_s
        waiting = dict(urls)
        while waiting:
            self.check_alive()
            for name, url in list(waiting.items()):
                if answers_ok(url):
                    del waiting[name]
                    on_ready(name)
            if waiting and time.monotonic() > deadline:
                logs = {running.name: running.log for running in self.running}
                name = next(iter(waiting))
                raise DemoError(f"{name} was not ready within {timeout_s:.0f} s:\n{tail(logs[name])}")
            time.sleep(POLL_S)

    def stop(self, running: Running) -> None:
        self._end([running])
        self.running.remove(running)

    def stop_all(self) -> None:
        self._end(list(reversed(self.running)))
        self.running.clear()

    @staticmethod
    def _end(chosen: Sequence[Running]) -> None:
        for running in chosen:
            if running.process.poll() is None:
                running.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_GRACE_S
        for running in chosen:
            try:
                running.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                running.process.kill()
                running.process.wait()
            # Children that outlived their parent. The group's id cannot have been taken by another
            # while one of them lives.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.process.pid, signal.SIGKILL)


def answers_ok(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def tail(log: Path, lines: int = 25) -> str:
    text = log.read_text(errors="replace").splitlines()[-lines:]
    return "\n".join(f"    {line}" for line in text) + f"\n  (the whole log: {log})"
