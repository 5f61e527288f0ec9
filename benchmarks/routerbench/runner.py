"""Runs everything: systems are started once and take turns, in an order that turns too."""

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from storebench.processes import SystemFailed, cpu_seconds

from routerbench.cases import CASES
from routerbench.figures import Figure, figure_of
from routerbench.load import Load
from routerbench.systems import DIRECT, Running, System

_ENGINE = Path(__file__).resolve().parents[1] / "router_engine.py"
_WARM_UP_S = 0.4


class Runner:
    """`urls` and `direct_port`: of the stand-in engines. `failed` says why a system was left out."""

    def __init__(
        self, urls: Sequence[str], direct_port: int, folder: Path, report: Callable[[str], None]
    ) -> None:
        self._urls = urls
        self._direct_port = direct_port
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
                        figures.append(self._measure(case, DIRECT, number, self._direct_port, None, seconds))
                    for one in turns:
                        self._report(f"round {number + 1} of {rounds}, {case}: {one.system.name}")
                        figures.append(
                            self._measure(case, one.system.name, number, one.port, one.pid, seconds)
                        )
        return figures

    def _start(self, system: System, stack: contextlib.ExitStack) -> Running | None:
        self._report(f"starting {system.name}")
        try:
            running = Running(system, self._urls, self._folder / f"{system.name}.log")
        except SystemFailed as error:
            self.failed[system.name] = str(error)
            return None
        stack.callback(running.stop)
        return running

    def _measure(
        self, case: str, system: str, number: int, port: int, pid: int | None, seconds: float
    ) -> Figure:
        Load(CASES[case], port).run(_WARM_UP_S)
        load = Load(CASES[case], port)
        cpu_before_s, began = tree_cpu_seconds(pid), time.perf_counter()
        load.run(seconds)
        return figure_of(
            case,
            system,
            number,
            latencies_s=load.latencies_s,
            first_tokens_s=load.first_tokens_s,
            errors=load.errors,
            seconds=time.perf_counter() - began,
            cpu_s=tree_cpu_seconds(pid) - cpu_before_s,
        )


def tree_cpu_seconds(pid: int | None) -> float:
    """CPU time so far of a process and all below it, by the kernel's own account; 0 for none."""
    if pid is None:
        return 0.0
    total = cpu_seconds(pid)
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += sum(tree_cpu_seconds(int(child)) for child in (task / "children").read_text().split())
    return total


def engine_command(python: str, port: int) -> list[str | Path]:
    return [python, _ENGINE, "--port", str(port), "--at-once"]
