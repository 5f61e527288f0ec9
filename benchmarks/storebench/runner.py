"""Runs all systems side by side: they take turns within every group of every round.

The machine's speed drifts (other tenants, clocks, caches); taking turns every few hundred milliseconds lets
a drift hit all systems alike, and turning the order each round keeps any of them from always going first.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from storebench.clients import Client, clear, run_phase, start_clients
from storebench.plan import (
    BUFFER_BYTES,
    MANY_CLIENTS,
    MANY_CLIENTS_BUFFER_BYTES,
    Budget,
    Cell,
    Group,
    groups,
)
from storebench.processes import SystemFailed
from storebench.stats import Figure, PhaseResult, summarise
from storebench.systems.base import System

Report = Callable[[str], None]
# The warm-up round is thrown away: it loads code, grows heaps and socket buffers, wakes threads.
WARM_UP_CALLS = 20


class Runner:
    """`advance` is called once per measured group and system; `report` with the text of each failure."""

    def __init__(
        self, budget: Budget, work_dir: Path, *, advance: Callable[[str], None], report: Report
    ) -> None:
        self._budget = budget
        self._work_dir = work_dir
        self._advance = advance
        self._report = report
        self._results: dict[tuple[str, Cell], list[PhaseResult]] = defaultdict(list)
        self.failed: dict[str, str] = {}

    def run(self, systems: Sequence[System]) -> list[Figure]:
        """Figures of all systems that could be started, one client first, then many."""
        with ExitStack() as stack:
            for system in systems:
                stack.callback(system.stop)
                try:
                    system.start(self._work_dir)
                except SystemFailed as error:
                    self._fail(system, error)
            for num_clients in (1, MANY_CLIENTS):
                self._run_stage(systems, num_clients)
        order = {system.name: index for index, system in enumerate(systems)}
        figures = [
            summarise(name, cell, results)
            for (name, cell), results in self._results.items()
            if any(result.latencies_ns for result in results)
        ]
        return sorted(
            figures,
            key=lambda f: (f.num_clients, f.op == "exists", f.num_keys, f.op, f.size_bytes, order[f.system]),
        )

    def num_steps(self, systems: Sequence[System]) -> int:
        """How often `advance` will be called."""
        return sum(
            self._budget.rounds
            for num_clients in (1, MANY_CLIENTS)
            for group in groups(self._budget, num_clients)
            for system in systems
            if any(map(system.measures, group.cells))
        )

    def _run_stage(self, systems: Sequence[System], num_clients: int) -> None:
        buffer_bytes = BUFFER_BYTES if num_clients == 1 else MANY_CLIENTS_BUFFER_BYTES
        with ExitStack() as stack:
            clients: dict[str, list[Client]] = {}
            for system in systems:
                if system.name in self.failed:
                    continue
                try:
                    clients[system.name] = start_clients(
                        system.client(), num_clients, buffer_bytes, self._work_dir, system.name
                    )
                except SystemFailed as error:
                    self._fail(system, error)
                else:
                    for client in clients[system.name]:
                        stack.callback(client.stop)
            for round_number in range(-1, self._budget.rounds):
                for group in groups(self._budget, num_clients):
                    turned = [*systems[round_number + 1 :], *systems[: round_number + 1]]
                    for system in turned:
                        self._take_turn(system, clients, group, round_number)

    def _take_turn(
        self, system: System, clients: Mapping[str, Sequence[Client]], group: Group, round_number: int
    ) -> None:
        cells = [cell for cell in group.cells if system.measures(cell)]
        warm_up = round_number < 0
        if cells and system.name not in self.failed:
            try:
                self._measure(system, clients[system.name], cells, group.max_calls, round_number)
            except SystemFailed as error:
                self._fail(system, error)
        if cells and not warm_up:
            self._advance(system.name)

    def _measure(
        self,
        system: System,
        clients: Sequence[Client],
        cells: Sequence[Cell],
        max_calls: int,
        round_number: int,
    ) -> None:
        first = cells[0]
        tag = f"{round_number}.{first.op}.{first.size_bytes}.{first.num_keys}.{first.num_clients}"
        warm_up = round_number < 0
        for cell in cells:
            result = run_phase(
                clients,
                system.server_pids,
                cell,
                tag=tag,
                max_calls=min(max_calls, WARM_UP_CALLS) if warm_up else max_calls,
                phase_s=self._budget.phase_s,
            )
            if not warm_up:
                self._results[system.name, cell].append(result)
        for client in clients:
            clear(client)

    def _fail(self, system: System, error: SystemFailed) -> None:
        self.failed[system.name] = str(error)
        self._report(f"{system.name} is left out: {error}")
