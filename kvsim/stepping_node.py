"""What every node with a decode batch does: memory for requests, runs of steps between two changes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

from kvsim.agenda import Agenda
from kvsim.batch import Batch
from kvsim.job import Job
from router.core.estimator import DecodeModel


class SteppingNode(ABC):
    """A request is taken when there is room for its KV as it will be at its end: an engine that took more
    would have to preempt. `ended(job, now)` is called at its end."""

    def __init__(
        self,
        agenda: Agenda,
        model: DecodeModel,
        kv_capacity_tokens: int,
        max_batch_requests: int,
        ended: Callable[[Job, float], None],
    ) -> None:
        self._agenda = agenda
        self._capacity_tokens = kv_capacity_tokens
        self._max_requests = max_batch_requests
        self._ended = ended
        self._waiting: deque[Job] = deque()
        self.batch = Batch(model)
        self._reserved_tokens = 0
        self._run_began_at = 0.0
        self._run_steps = 0
        self._run_number = 0
        self.busy_ms = 0.0

    @property
    def kv_share(self) -> float:
        return self._reserved_tokens / self._capacity_tokens

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @abstractmethod
    def _step(self, now: float) -> None:
        """Between two steps: who may join joins, and what comes next begins."""

    def _has_room(self, job: Job) -> bool:
        needed = self._reserved_tokens + job.final_kv_tokens
        # Alone it may try even if it is too long: there is nothing to wait for.
        return not self._reserved_tokens or (
            needed <= self._capacity_tokens and len(self.batch) < self._max_requests
        )

    def _reserve(self, job: Job) -> None:
        self._reserved_tokens += job.final_kv_tokens

    def _end(self, job: Job, now: float) -> None:
        self._reserved_tokens -= job.final_kv_tokens
        self._ended(job, now)

    def _wake(self, job: Job, now: float) -> None:
        """`job` may join: at once when nothing runs, else after the step the run is in."""
        if not len(self.batch):
            self._step(now)
        elif self._has_room(job):
            steps = self.batch.steps_within((now - self._run_began_at) * 1e3)
            if steps < self._run_steps:
                self._plan(steps)

    def _run(self, now: float) -> None:
        """Decode steps alone, until the first request ends or somebody may join."""
        if len(self.batch):
            self._run_began_at = now
            self._plan(self.batch.steps_to_next_end)

    def _plan(self, steps: int) -> None:
        self._run_steps = steps
        self._run_number += 1
        number = self._run_number
        due_at = self._run_began_at + self.batch.run_ms(steps) / 1e3
        self._agenda.at(due_at, lambda now: self._run_over(number, now))

    def _run_over(self, number: int, now: float) -> None:
        if number != self._run_number:
            return
        total_ms = self.batch.run_ms(self._run_steps)
        self.busy_ms += total_ms
        self._advance(self._run_steps, total_ms, now)
        self._step(now)

    def _advance(self, steps: int, total_ms: float, now: float, first_extra_ms: float = 0.0) -> None:
        for job in self.batch.advance(steps, total_ms, first_extra_ms):
            self.batch.close(job)
            self._end(job, now)
