"""A decode node that also prefills whole prompts, in chunks that fit beside its batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvsim.agenda import Agenda
from kvsim.coupled_node import CoupledNode
from kvsim.engine_model import EngineSpec
from kvsim.job import Job
from kvsim.network import Link, Network
from kvsim.storage import Storage


class ElasticNode(CoupledNode):
    """`number` is its number in `storage`: its DRAM is part of the pool like that of prefill nodes. Copying
    from DRAM to the GPU overlaps the chunks. Requests prefilled elsewhere `join` before prompts begin."""

    def __init__(
        self,
        number: int,
        agenda: Agenda,
        network: Network,
        storage: Storage,
        engine: EngineSpec,
        block_size_tokens: int,
        chunk_tokens: int,
        began: Callable[[Job], None],
        first_token: Callable[[Job, float], None],
        ended: Callable[[Job, float], None],
    ) -> None:
        super().__init__(agenda, engine, block_size_tokens, False, chunk_tokens, first_token, ended)
        self.number = number
        self.egress = Link(engine.nic_bytes_per_s)
        self._network = network
        self._storage = storage
        self._block_bytes = block_size_tokens * engine.kv_bytes_per_token
        self._began = began
        self._arrived: deque[Job] = deque()

    def submit_prompt(self, job: Job, source: Link | None, ingress: Link, now: float) -> None:
        """`source`: where the leading blocks of the job's transfer are copied from first."""
        transfer = job.decision.transfer
        if source is None or transfer is None:
            self.submit(job, now)
            return
        job.needs_transfer = True
        num_blocks = transfer.num_blocks

        def arrived(then: float) -> None:
            job.needs_transfer = False
            self._storage.keep(self.number, job, num_blocks)
            self.wake(job, then)

        self._waiting.append(job)
        size_bytes = (num_blocks - transfer.first_block) * self._block_bytes
        self._network.send([source, ingress], size_bytes, arrived)

    def join(self, job: Job, now: float) -> None:
        self._arrived.append(job)
        self.wake(job, now)

    def leading(self, job: Job) -> int:
        return self._storage.leading(self.number, job)[0]

    def keep(self, job: Job) -> None:
        self._storage.keep(self.number, job, len(job.keys))

    def next_prompt(self) -> Job | None:
        for position, job in enumerate(self._waiting):
            if not job.needs_transfer:
                if not self._has_room(job):
                    return None
                del self._waiting[position]
                self._began(job)
                return job
        return None

    def admit_arrived(self, now: float) -> None:
        while self._arrived and self._has_room(self._arrived[0]):
            job = self._arrived.popleft()
            self._reserve(job)
            self._first_token(job, now)
            self.batch.add(job)
