"""The process that is a guest: start it, pass on what its command prints, end it."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import BinaryIO

from rdma_guest.errors import say
from rdma_guest.job import Job

TIME_LIMIT_STATUS, NO_STATUS = 124, 125
_LOOK_EVERY_S = 0.01
_PR_SET_PDEATHSIG = 1


class Machine:
    """`close` leaves no process behind, whatever happened before."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], job: Job) -> None:
        self._job = job
        libc = ctypes.CDLL(None)
        with job.console.open("wb") as console:
            self._process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                env=environment,
                start_new_session=True,
                # So that a killed rdma-vm leaves no guest.
                preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
            )

    def follow(self, limit_s: float, output: BinaryIO) -> int:
        """The command's exit status; 124 when it took longer than `limit_s`, 125 when the guest died."""
        deadline = time.monotonic() + limit_s
        with self._job.output.open("rb") as source:
            while True:
                # In this order: what is written before the status is there is still read.
                ended = self._process.poll() is not None
                status = self._job.status()
                self._pass_on(source, output)
                if status is not None:
                    return status
                if ended:
                    return NO_STATUS
                if time.monotonic() > deadline:
                    say(f"the time limit of {limit_s:g} s is reached")
                    return TIME_LIMIT_STATUS
                time.sleep(_LOOK_EVERY_S)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    @staticmethod
    def _pass_on(source: BinaryIO, output: BinaryIO) -> None:
        while chunk := source.read(1 << 16):
            output.write(chunk)
            output.flush()


def exit_on_signals() -> None:
    """So that `finally` runs when somebody ends us."""

    def leave(number: int, frame: object) -> None:
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, leave)
