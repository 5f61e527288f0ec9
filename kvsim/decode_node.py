"""A node that only decodes."""

from __future__ import annotations

from collections.abc import Callable

from kvsim.agenda import Agenda
from kvsim.job import Job
from kvsim.stepping_node import SteppingNode
from router.core.estimator import DecodeModel


class DecodeNode(SteppingNode):
    """Requests whose KV has arrived wait until there is room for it, and join between two steps.
    `first_token(job, now)` is called when they join."""

    def __init__(
        self,
        agenda: Agenda,
        model: DecodeModel,
        kv_capacity_tokens: int,
        max_batch_requests: int,
        first_token: Callable[[Job, float], None],
        ended: Callable[[Job, float], None],
    ) -> None:
        super().__init__(agenda, model, kv_capacity_tokens, max_batch_requests, ended)
        self._first_token = first_token

    def join(self, job: Job, now: float) -> None:
        self._waiting.append(job)
        self._wake(job, now)

    def _step(self, now: float) -> None:
        while self._waiting and self._has_room(self._waiting[0]):
            job = self._waiting.popleft()
            self._reserve(job)
            self._first_token(job, now)
            self.batch.add(job)
        self._run(now)
