"""Continuous batching, iteration by iteration, but computed for runs of equal composition at once.

Between two changes of a batch its steps differ only by the tokens they add, so their durations are an
arithmetic progression: a run of any length costs one event. Nothing is approximated by that.
"""

from __future__ import annotations

import heapq
import math

from kvsim.intervals import StepLog, later_first, tail_mean_ms
from kvsim.job import Job
from router.core.estimator import DecodeModel


class Batch:
    def __init__(self, model: DecodeModel) -> None:
        self._model = model
        self._log = StepLog()
        self._steps_done = 0
        self._ends: list[tuple[int, int, Job]] = []  # a heap: (step after which it is complete, number, job)
        self.kv_tokens = 0

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def steps_to_next_end(self) -> int:
        return self._ends[0][0] - self._steps_done

    @property
    def step_ms(self) -> float:
        """Of the next step."""
        return self._model.tbt_ms(len(self._ends), self.kv_tokens)

    @property
    def idle_ms(self) -> float:
        """What a step costs whoever is in it: the weights are read once."""
        return self._model.constant_ms

    def add(self, job: Job) -> None:
        """Its first token is there; the others come one a step, from the next step on."""
        job.log_mark = self._log.mark
        end = self._steps_done + job.request.output_tokens - 1
        heapq.heappush(self._ends, (end, job.outcome.number, job))
        self.kv_tokens += job.request.prompt_tokens + 1

    def run_ms(self, steps: int) -> float:
        growth_ms = self._model.per_kv_token_ms * len(self._ends)
        return steps * self.step_ms + growth_ms * (steps * (steps - 1) / 2)

    def steps_within(self, elapsed_ms: float) -> int:
        """The least number of whole steps that takes at least so long; at least one."""
        first_ms = self.step_ms
        growth_ms = self._model.per_kv_token_ms * len(self._ends)
        if growth_ms * elapsed_ms < 1e-9 * first_ms * first_ms:
            return max(1, math.ceil(elapsed_ms / first_ms - 1e-6))
        b = first_ms - growth_ms / 2
        return max(1, math.ceil((math.sqrt(b * b + 2 * growth_ms * elapsed_ms) - b) / growth_ms - 1e-6))

    def advance(self, steps: int, total_ms: float, first_extra_ms: float = 0.0) -> list[Job]:
        """`steps` steps took `total_ms`; before the first the batch stood still for `first_extra_ms`. Returns
        the requests that are complete, their outcomes filled in."""
        if first_extra_ms:
            first_ms = total_ms / steps
            self._log.add(1, first_ms + first_extra_ms)
            if steps > 1:
                self._log.add(steps - 1, total_ms - first_ms)
        else:
            self._log.add(steps, total_ms)
        self._steps_done += steps
        self.kv_tokens += steps * len(self._ends)
        complete: list[Job] = []
        while self._ends and self._ends[0][0] <= self._steps_done:
            job = heapq.heappop(self._ends)[2]
            self.kv_tokens -= job.final_kv_tokens
            complete.append(job)
        return complete

    def close(self, job: Job) -> None:
        """Fills in the TBT of a request that is complete, whose first step came `first_wait_ms` late."""
        outcome = job.outcome
        logged = self._log.since(job.log_mark)
        runs = later_first(logged, job.first_wait_ms)
        outcome.tbt_ms = outcome.tbt_at_prefill_ms = tail_mean_ms(runs)
        if outcome.handover_ms:
            outcome.tbt_at_prefill_ms = tail_mean_ms(
                later_first(logged, job.first_wait_ms + outcome.handover_ms)
            )
        count = sum(steps for _, steps in runs)
        outcome.mean_tbt_ms = sum(ms * steps for ms, steps in runs) / count if count else 0.0
