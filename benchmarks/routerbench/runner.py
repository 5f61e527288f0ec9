"""Runs everything: systems are started once and take turns, in an order that turns too."""

import contextlib
import http.client
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from storebench.processes import SystemFailed, cpu_seconds

from routerbench.calls import engine_calls
from routerbench.cases import CASES
from routerbench.figures import Figure, figure_of
from routerbench.load import Load
from routerbench.systems import DIRECT, Running, System

_ENGINE = Path(__file__).resolve().parents[1] / "router_engine.py"
_WARM_UP_S = 0.4


class Engines(msgspec.Struct, frozen=True):
    """Ports of stand-in engines: as `vllm serve` is by default, and with --enable-scale-out."""

    plain: Sequence[int]
    scale_out: Sequence[int]

    def of(self, system: System) -> Sequence[int]:
        return self.scale_out if system.scale_out else self.plain


class Runner:
    """`failed` says why a system was left out."""

    def __init__(self, engines: Engines, folder: Path, report: Callable[[str], None]) -> None:
        self._engines = engines
        self._folder = folder
        self._report = report
        self.failed: dict[str, str] = {}

    def run(
        self, systems: Sequence[System], cases: Sequence[str], *, rounds: int, seconds: float
    ) -> list[Figure]:
        with contextlib.ExitStack() as stack:
            running = [one for system in systems if (one := self._start(system, stack)) is not None]
            figures = []
            for number in range(rounds):
                for case in cases:
                    turns = [one for one in running if one.system.takes(CASES[case])]
                    turns = turns[number % max(len(turns), 1) :] + turns[: number % max(len(turns), 1)]
                    if not CASES[case].separate_prefill:
                        figures.append(self._measure(case, None, number, seconds))
                    for one in turns:
                        self._report(f"round {number + 1} of {rounds}, {case}: {one.system.name}")
                        figures.append(self._measure(case, one, number, seconds))
        return figures

    def _start(self, system: System, stack: contextlib.ExitStack) -> Running | None:
        self._report(f"starting {system.name}")
        try:
            urls = [f"http://127.0.0.1:{port}" for port in self._engines.of(system)]
            running = Running(system, urls, self._folder / f"{system.name}.log")
        except SystemFailed as error:
            self.failed[system.name] = str(error)
            return None
        stack.callback(running.stop)
        return running

    def _measure(self, case: str, running: Running | None, number: int, seconds: float) -> Figure:
        """None: the first engine itself."""
        port, pid = (running.port, running.pid) if running else (self._engines.plain[0], None)
        Load(CASES[case], port).run(_WARM_UP_S)
        load = Load(CASES[case], port)
        cpu_before_s, began = tree_cpu_seconds(pid), time.perf_counter()
        load.run(seconds)
        took_s, cpu_s = time.perf_counter() - began, tree_cpu_seconds(pid) - cpu_before_s
        return figure_of(
            case,
            running.system.name if running else DIRECT,
            number,
            latencies_s=load.latencies_s,
            first_tokens_s=load.first_tokens_s,
            errors=load.errors,
            seconds=took_s,
            cpu_s=cpu_s,
            engine_calls=self._engine_calls(case, running) if running else {},
        )

    def _engine_calls(self, case: str, running: Running) -> dict[str, float]:
        if not CASES[case].has_prompts:
            return {}
        try:
            return engine_calls(CASES[case], running.port, self._engines.of(running.system))
        except (OSError, http.client.HTTPException) as error:
            self._report(f"{running.system.name}: calls to engines could not be counted: {error}")
            return {}


def tree_cpu_seconds(pid: int | None) -> float:
    """CPU time so far of a process and all below it, by the kernel's own account; 0 for none."""
    if pid is None:
        return 0.0
    total = cpu_seconds(pid)
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += sum(tree_cpu_seconds(int(child)) for child in (task / "children").read_text().split())
    return total


def engine_command(python: str, port: int, *flags: str) -> list[str | Path]:
    return [python, _ENGINE, "--port", str(port), "--at-once", *flags]
