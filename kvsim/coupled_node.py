"""A node that prefills and decodes, as vLLM without disaggregation: the baselines of the paper."""

from __future__ import annotations

from collections.abc import Callable

from kvsim.agenda import Agenda
from kvsim.block_cache import BlockCache
from kvsim.engine_model import EngineSpec
from kvsim.job import Job
from kvsim.stepping_node import SteppingNode


class CoupledNode(SteppingNode):
    """Without a chunk size a prompt is computed whole, prompts before decode steps, and the batch stands
    still meanwhile. With one, a step computes what its token budget leaves after the batch's own tokens, and
    both get on together. The prefix cache is what GPU memory the running requests leave.
    """

    def __init__(
        self,
        agenda: Agenda,
        engine: EngineSpec,
        block_size_tokens: int,
        has_prefix_cache: bool,
        chunk_tokens: int,
        first_token: Callable[[Job, float], None],
        ended: Callable[[Job, float], None],
    ) -> None:
        super().__init__(
            agenda, engine.decode_model(), engine.kv_capacity_tokens, engine.max_batch_requests, ended
        )
        self._prefill = engine.prefill_model()
        self._block_size_tokens = block_size_tokens
        self._cache = (
            BlockCache("lru", self._capacity_tokens // block_size_tokens) if has_prefix_cache else None
        )
        self._chunk_tokens = chunk_tokens
        self._first_token = first_token
        self._prefilling: Job | None = None
        self._stall_ms = 0.0
        self._is_stepping = False

    def submit(self, job: Job, now: float) -> None:
        self._waiting.append(job)
        self.wake(job, now)

    def wake(self, job: Job, now: float) -> None:
        """`job` may begin: at once when nothing runs, else after the step under way."""
        if not self._is_stepping:
            self._wake(job, now)

    def leading(self, job: Job) -> int:
        """Leading blocks of the prompt that need not be computed here."""
        return self._cache.leading(job.keys)[0] if self._cache is not None else 0

    def keep(self, job: Job) -> None:
        """Its prompt has been computed."""
        if self._cache is not None:
            self._cache.keep(job.keys)

    def next_prompt(self) -> Job | None:
        """The one to be computed next, taken from those waiting; None when none may begin."""
        if not self._waiting or not self._has_room(self._waiting[0]):
            return None
        return self._waiting.popleft()

    def admit_arrived(self, now: float) -> None:
        """Between two steps; for nodes that get requests prefilled elsewhere."""

    def _fit_cache(self) -> None:
        if self._cache is not None:
            free_tokens = max(0, self._capacity_tokens - self._reserved_tokens)
            self._cache.shrink(free_tokens // self._block_size_tokens)

    def _take(self) -> Job | None:
        job = self.next_prompt()
        if job is None:
            return None
        self._reserve(job)
        held = self.leading(job)
        self._fit_cache()
        outcome, prompt_tokens = job.outcome, job.request.prompt_tokens
        outcome.hit_blocks = held
        outcome.hit_tokens = min(held * self._block_size_tokens, prompt_tokens - 1)
        outcome.prefill_ms = self._prefill.compute_ms(prompt_tokens, outcome.hit_tokens)
        job.prefilled_tokens = outcome.hit_tokens
        return job

    def _step(self, now: float) -> None:
        self._is_stepping = False
        self.admit_arrived(now)
        if self._prefilling is None:
            self._prefilling = self._take()
        job = self._prefilling
        if job is None:
            self._run(now)
            return
        self._is_stepping = True
        if not self._chunk_tokens:
            # The running batch feels it as one long interval.
            self._stall_ms += job.outcome.prefill_ms if len(self.batch) else 0.0
            self.busy_ms += job.outcome.prefill_ms
            self._agenda.at(now + job.outcome.prefill_ms / 1e3, lambda then: self._prefilled(job, then))
            return
        room = max(1, self._chunk_tokens - len(self.batch))
        upto = min(job.prefilled_tokens + room, job.request.prompt_tokens)
        step_ms = self._prefill.compute_ms(upto, job.prefilled_tokens)
        if len(self.batch):
            # Weights are read for chunk and batch together.
            step_ms += self.batch.step_ms - self.batch.idle_ms
        job.prefilled_tokens = upto
        self.busy_ms += step_ms
        self._agenda.at(now + step_ms / 1e3, lambda then: self._chunk_done(job, step_ms, then))

    def _chunk_done(self, job: Job, step_ms: float, now: float) -> None:
        if len(self.batch):
            self._advance(1, step_ms, now)
        if job.prefilled_tokens >= job.request.prompt_tokens:
            self._prefilled(job, now)
        else:
            self._step(now)

    def _prefilled(self, job: Job, now: float) -> None:
        self._prefilling = None
        self.keep(job)
        self._first_token(job, now)
        if job.request.output_tokens > 1:
            # It has not felt the prefills (its own among them) for which the others are still waiting.
            job.first_wait_ms = -self._stall_ms
            self.batch.add(job)
        else:
            self._end(job, now)
        self._step(now)

    def _advance(self, steps: int, total_ms: float, now: float, first_extra_ms: float = 0.0) -> None:
        stall_ms, self._stall_ms = self._stall_ms, 0.0
        super()._advance(steps, total_ms, now, first_extra_ms + stall_ms)
        self._fit_cache()
