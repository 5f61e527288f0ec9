"""Runs everything: systems are started once and take turns, in an order that turns too."""

import contextlib
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
from storebench.processes import SystemFailed, cpu_seconds

from corebench.behaviours import Outcome, try_all
from corebench.figures import Figure
from corebench.inputs import (
    BLOCK_TOKENS,
    CHOICE_DEPTHS,
    WORKERS,
    growing_chains,
    inputs,
    prompts,
    random_names,
    random_tokens,
    stored,
)
from corebench.publishing import Engines
from corebench.systems import COMPILED, Subject, System
from corebench.waiting import wait_until

_ENGINES = 8  # whose events are followed while that is what is measured
_TAKEN_IN_TIMEOUT_S = 60.0
_GLANCE_S = 0.05  # rare: looking takes CPU time of the one that is measured
_MEMORY_BATCH_BLOCKS = 64
_MEMORY_WINDOW_BATCHES = 16  # of each engine: none may pile up and count as memory of the index


class Budget(msgspec.Struct, frozen=True):
    """`batches`: blocks in each, and how many of each engine: of a decode step, of a few of them, of a
    chunk of a prefill. `min_s`: CPU time for one figure of the rest."""

    rounds: int = 3
    memory_blocks: int = 1_000_000
    batches: Sequence[tuple[int, int]] = ((1, 800), (8, 500), (64, 100))
    min_s: float = 0.1


class Runner:
    """`failed` says why a system was left out."""

    def __init__(self, systems: Sequence[System], folder: Path, report: Callable[[str], None]) -> None:
        self._systems = list(systems)
        self._folder = folder
        self._report = report
        self.failed: dict[str, str] = {}
        self.outcomes: list[Outcome] = []
        self.figures: list[Figure] = []

    def run(self, budget: Budget) -> None:
        for what in (self._try_behaviours, lambda one: self._measure_memory(one, budget.memory_blocks)):
            for system in list(self._systems):
                with self._left_out_if_it_fails(system):
                    what(system)
        with contextlib.ExitStack() as stack:
            self._ingest(budget, stack)
        with contextlib.ExitStack() as stack:
            self._operate(budget, stack)

    # ---- once for each system ---------------------------------------------------------------------------

    def _try_behaviours(self, system: System) -> None:
        self._report(f"behaviour: {system.name}")
        with contextlib.closing(self._started(system)) as subject:
            self.outcomes += try_all(subject)

    def _measure_memory(self, system: System, num_blocks: int) -> None:
        """What the process grows by while the blocks come in, each held by one of its workers."""
        self._report(f"memory: {system.name}")
        with contextlib.closing(self._started(system)) as subject, Engines(_ENGINES) as engines:
            _follow(subject, engines)
            _take_in(subject, engines, [], seed=0)
            streams = [prompts(engine, _MEMORY_BATCH_BLOCKS) for engine in range(_ENGINES)]
            before = _resident_bytes(subject.pid)
            published = 0
            while published < num_blocks:
                window = [[next(stream) for _ in range(_MEMORY_WINDOW_BATCHES)] for stream in streams]
                published += _ENGINES * _MEMORY_WINDOW_BATCHES * _MEMORY_BATCH_BLOCKS
                _take_in(subject, engines, window, seed=published)
            grown = _resident_bytes(subject.pid) - before
        name = f"memory, {num_blocks:,} blocks"
        self.figures.append(Figure(name, system.name, 0, grown / published, "bytes/block"))

    # ---- in turns ---------------------------------------------------------------------------------------

    def _ingest(self, budget: Budget, stack: contextlib.ExitStack) -> None:
        followed: dict[str, tuple[Subject, Engines]] = {}
        for system in list(self._systems):
            with self._left_out_if_it_fails(system):
                subject = stack.enter_context(contextlib.closing(self._started(system)))
                engines = stack.enter_context(Engines(_ENGINES))
                _follow(subject, engines)
                followed[system.name] = subject, engines
        for number in range(-1, budget.rounds):  # -1: to warm up
            for blocks, batches in budget.batches:
                seed = (number + 2) * 1000 + blocks
                payloads = [list(growing_chains(seed * 10 + n, blocks, batches)) for n in range(_ENGINES)]
                name = f"events, batches of {blocks} block{'s' if blocks > 1 else ''}"
                for system in self._turns(number):
                    self._report(f"round {number + 1} of {budget.rounds}, {name}: {system.name}")
                    with self._left_out_if_it_fails(system):
                        subject, engines = followed[system.name]
                        cpu_before_s = cpu_seconds(subject.pid)
                        _take_in(subject, engines, payloads, seed)
                        spent_s = cpu_seconds(subject.pid) - cpu_before_s
                        value = _ENGINES * batches / spent_s
                        if number >= 0:
                            self.figures.append(Figure(name, system.name, number, value, "batches/s"))

    def _operate(self, budget: Budget, stack: contextlib.ExitStack) -> None:
        given = inputs()
        path = self._folder / "inputs.json"
        path.write_bytes(msgspec.json.encode(given))
        prepared: dict[str, Subject] = {}
        names: list[str] = []
        for system in list(self._systems):
            with self._left_out_if_it_fails(system):
                self._report(f"preparing {system.name}")
                subject = stack.enter_context(contextlib.closing(self._started(system)))
                engines = stack.enter_context(Engines(WORKERS))
                _follow(subject, engines)
                for worker, depth in enumerate(CHOICE_DEPTHS):
                    if depth:
                        known = stored(given.names[:depth], given.token_ids[: depth * BLOCK_TOKENS])
                        engines.publish_events(worker, [known])
                _take_in(subject, engines, [], seed=0)
                depths = subject.depths(given.token_ids)
                if [depths.get(worker, 0) for worker in range(WORKERS)] != CHOICE_DEPTHS:
                    raise SystemFailed("it does not know what each worker holds")
                names = subject.call("prepare", str(path))
                subject.call("load")
                prepared[system.name] = subject
        for number in range(budget.rounds):
            for name in names:
                for system in self._turns(number):
                    self._report(f"round {number + 1} of {budget.rounds}, {name}: {system.name}")
                    with self._left_out_if_it_fails(system):
                        value = prepared[system.name].call("measure", name, budget.min_s)
                        self.figures.append(Figure(name, system.name, number, value, "us"))

    def _turns(self, number: int) -> list[System]:
        first = number % max(len(self._systems), 1)
        return self._systems[first:] + self._systems[:first]

    def _started(self, system: System) -> Subject:
        with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as log:
            subject = Subject(system, Path(log.name))
        if system.name == COMPILED and not subject.call("is_compiled"):
            subject.close()
            raise SystemFailed("its modules are not the compiled ones")
        return subject

    @contextlib.contextmanager
    def _left_out_if_it_fails(self, system: System) -> Iterator[None]:
        try:
            yield
        except SystemFailed as error:
            self.failed[system.name] = str(error)
            self._systems.remove(system)


def _follow(subject: Subject, engines: Engines) -> None:
    for number, endpoint in enumerate(engines.endpoints):
        subject.call("follow", number, endpoint)
    engines.wait_heard()


def _take_in(subject: Subject, engines: Engines, payloads: Sequence[Sequence[bytes]], seed: int) -> None:
    """Publishes, and returns once the subject knows the block that every engine publishes last."""
    rng = random.Random(f"last {seed}")
    last = stored(random_names(rng, 1), random_tokens(rng, BLOCK_TOKENS))
    engines.publish_in_turn(payloads)
    count = len(engines.endpoints)
    for engine in range(count):
        engines.publish_events(engine, [last])

    def is_known() -> bool:
        return list(subject.depths(list(last.token_ids)).values()) == [1] * count

    if not wait_until(is_known, _TAKEN_IN_TIMEOUT_S, _GLANCE_S):
        raise SystemFailed("it does not take in all events")


def _resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS:"))
