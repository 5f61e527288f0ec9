"""The parent's side of the client processes."""

import json
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from storebench.plan import Cell
from storebench.processes import Process, SystemFailed, cpu_seconds
from storebench.stats import PhaseResult

BENCHMARKS_DIR = Path(__file__).resolve().parent.parent
START_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 60.0
# Long enough for all clients to have read the command before they start together.
COMMON_START_NS = 20_000_000


class ClientSpec(NamedTuple):
    """How to start a client: `driver` is "module:factory", called with `arguments`."""

    driver: str
    arguments: dict[str, Any]
    python: str = sys.executable
    python_path: tuple[Path, ...] = ()
    environment: Mapping[str, str] = {}


class Client:
    def __init__(self, spec: ClientSpec, index: int, buffer_bytes: int, log_path: Path) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = Process(
                [
                    spec.python,
                    "-m",
                    "storebench.worker",
                    *("--control-fd", str(theirs.fileno())),
                    *("--driver", spec.driver),
                    *("--arguments", json.dumps(spec.arguments)),
                    *("--client", str(index)),
                    *("--buffer-bytes", str(buffer_bytes)),
                ],
                log_path,
                environment={
                    **spec.environment,
                    "PYTHONPATH": ":".join(map(str, (BENCHMARKS_DIR, *spec.python_path))),
                },
                pass_fds=[theirs.fileno()],
            )
        self._stream = self._control.makefile("rw", encoding="utf-8")

    def wait_started(self) -> None:
        self.answer(START_TIMEOUT_S)

    def send(self, command: dict[str, Any]) -> None:
        try:
            self._stream.write(json.dumps(command) + "\n")
            self._stream.flush()
        except OSError as error:
            raise SystemFailed(f"client process is gone:\n{self._process.log_tail()}") from error

    def answer(self, timeout_s: float = ANSWER_TIMEOUT_S) -> dict[str, Any]:
        self._control.settimeout(timeout_s)
        try:
            line = self._stream.readline()
        except OSError as error:
            raise SystemFailed(f"client process gave no answer in {timeout_s:.0f} s") from error
        if not line:
            raise SystemFailed(f"client process is gone:\n{self._process.log_tail()}")
        value: dict[str, Any] = json.loads(line)
        if "error" in value:
            raise SystemFailed(f"client: {value['error']}\n{self._process.log_tail()}")
        return value

    def stop(self) -> None:
        # End of file is the worker's sign to close its driver; a signal would cut that short.
        self._stream.close()
        self._control.close()
        self._process.wait_end()


def start_clients(spec: ClientSpec, count: int, buffer_bytes: int, log_dir: Path, name: str) -> list[Client]:
    """Started side by side; all stopped again when one of them fails."""
    clients: list[Client] = []
    try:
        for index in range(count):
            clients.append(Client(spec, index, buffer_bytes, log_dir / f"{name}-client{count}.{index}.log"))
        for client in clients:
            client.wait_started()
    except BaseException:
        for client in clients:
            client.stop()
        raise
    return clients


def run_phase(
    clients: Sequence[Client],
    server_pids: Sequence[int],
    cell: Cell,
    *,
    tag: str,
    max_calls: int,
    phase_s: float,
) -> PhaseResult:
    """All clients run the cell at the same time."""
    arguments = {
        "tag": tag,
        "max_calls": max_calls,
        "phase_s": phase_s,
        "start_ns": time.monotonic_ns() + COMMON_START_NS,
    }
    servers_begin_s = sum(map(cpu_seconds, server_pids))
    for client in clients:
        client.send({"do": "phase", "cell": list(cell), "arguments": arguments})
    answers = [client.answer() for client in clients]
    servers_s = sum(map(cpu_seconds, server_pids)) - servers_begin_s
    return PhaseResult(
        latencies_ns=tuple(ns for answer in answers for ns in answer["latencies_ns"]),
        window_s=(max(a["end_ns"] for a in answers) - min(a["begin_ns"] for a in answers)) / 1e9,
        cpu_s=servers_s + sum(answer["cpu_s"] for answer in answers),
        failures=sum(answer["failures"] for answer in answers),
        wrong_bytes=sum(answer["wrong_bytes"] for answer in answers),
    )


def clear(client: Client) -> None:
    client.send({"do": "clear"})
    client.answer()
