"""A node that only decodes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvsim.agenda import Agenda
from kvsim.batch import Batch
from kvsim.job import Job
from router.core.estimator import DecodeModel


class DecodeNode:
    """Requests whose KV has arrived wait until there is room for it as it will be at their end: an engine
    that took more would have to preempt. They join between two steps. `first_token(job, now)` is called when
    they join, `ended` at their end."""

    def __init__(
        self,
        agenda: Agenda,
        model: DecodeModel,
        kv_capacity_tokens: int,
        max_batch_requests: int,
        first_token: Callable[[Job, float], None],
        ended: Callable[[Job, float], None],
    ) -> None:
        self._agenda = agenda
        self._capacity_tokens = kv_capacity_tokens
        self._max_requests = max_batch_requests
        self._first_token = first_token
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

    def join(self, job: Job, now: float) -> None:
        self._waiting.append(job)
        if not len(self.batch):
            self._admit(now)
            self._run(now)
            return
        # The run under way ends with the step it is in, so that the request can join.
        elapsed_ms = (now - self._run_began_at) * 1e3
        if self._has_room(job) and (steps := self.batch.steps_within(elapsed_ms)) < self._run_steps:
            self._plan(steps)

    def _has_room(self, job: Job) -> bool:
        needed = self._reserved_tokens + job.final_kv_tokens
        # Alone it may try even if it is too long: there is nothing to wait for.
        return not self._reserved_tokens or (
            needed <= self._capacity_tokens and len(self.batch) < self._max_requests
        )

    def _admit(self, now: float) -> None:
        while self._waiting and self._has_room(self._waiting[0]):
            job = self._waiting.popleft()
            self._reserved_tokens += job.final_kv_tokens
            self._first_token(job, now)
            self.batch.add(job)

    def _run(self, now: float) -> None:
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
        for job in self.batch.advance(self._run_steps, total_ms):
            self._reserved_tokens -= job.final_kv_tokens
            self.batch.close(job)
            self._ended(job, now)
        self._admit(now)
        self._run(now)
