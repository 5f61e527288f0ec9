"""A node, or a group of nodes in a pipeline, that only prefills: one prompt after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvsim.agenda import Agenda
from kvsim.engine_model import EngineSpec, pipelined_prefill
from kvsim.job import Job
from kvsim.network import Link, Network
from kvsim.storage import Storage


class PrefillNode:
    """`number` is its number in `storage`. `began(job, now)` is called when a prefill begins, `done` when its
    first token is there."""

    def __init__(
        self,
        number: int,
        agenda: Agenda,
        network: Network,
        storage: Storage,
        engine: EngineSpec,
        num_nodes: int,
        chunk_tokens: int,
        block_size_tokens: int,
        is_layerwise: bool,
        began: Callable[[Job, float], None],
        done: Callable[[Job, float], None],
    ) -> None:
        self.number = number
        self.ingress = Link(engine.nic_bytes_per_s * num_nodes)
        self.egress = Link(engine.nic_bytes_per_s * num_nodes)
        self.busy_ms = 0.0
        self._agenda = agenda
        self._network = network
        self._storage = storage
        self._model = engine.prefill_model()
        self._num_nodes = num_nodes
        self._chunk_tokens = chunk_tokens
        self._block_size_tokens = block_size_tokens
        self._block_bytes = block_size_tokens * engine.kv_bytes_per_token
        self._dram_ms_per_block = self._block_bytes / (engine.h2d_bytes_per_s * num_nodes) * 1e3
        self._ssd_ms_per_block = self._block_bytes / (engine.disk_bytes_per_s * num_nodes) * 1e3
        self._is_layerwise = is_layerwise
        self._began = began
        self._done = done
        self._waiting: deque[Job] = deque()
        self._is_busy = False

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def submit(self, job: Job, source: Link | None, now: float) -> None:
        """`source`: where the leading blocks of the job's transfer are copied from first."""
        self._waiting.append(job)
        transfer = job.decision.transfer
        if source is not None and transfer is not None:
            missing = transfer.num_blocks - transfer.first_block
            self._fetch(job, [source, self.ingress], missing, transfer.num_blocks)
        elif self._storage.is_remote and (held := self._storage.leading(self.number, job)[0]):
            self._fetch(job, [self.ingress], held, 0)
        self._next(now)

    def write_out(self, num_blocks: int) -> None:
        """New blocks go to where the global store keeps them."""
        if num_blocks:
            self._network.send([self.egress], num_blocks * self._block_bytes, lambda now: None)

    def _fetch(self, job: Job, links: list[Link], num_blocks: int, kept_blocks: int) -> None:
        job.needs_transfer = True

        def arrived(now: float) -> None:
            job.needs_transfer = False
            if kept_blocks:
                self._storage.keep(self.number, job, kept_blocks)
            self._next(now)

        self._network.send(links, num_blocks * self._block_bytes, arrived)

    def _next(self, now: float) -> None:
        if self._is_busy:
            return
        # Who waits for the network does not keep those behind from computing.
        for position, job in enumerate(self._waiting):
            if not job.needs_transfer:
                del self._waiting[position]
                self._begin(job, now)
                return

    def _begin(self, job: Job, now: float) -> None:
        held, on_ssd = self._storage.leading(self.number, job)
        prompt_tokens = job.request.prompt_tokens
        # The last token is always computed: its logits are what the prefill is for.
        hit_tokens = min(held * self._block_size_tokens, prompt_tokens - 1)
        cost = pipelined_prefill(self._model, prompt_tokens, hit_tokens, self._num_nodes, self._chunk_tokens)
        load_ms = (held - on_ssd) * self._dram_ms_per_block + on_ssd * self._ssd_ms_per_block
        if self._is_layerwise:
            occupied_ms = max(cost.occupied_ms, load_ms)
            latency_ms = max(cost.latency_ms, load_ms)
        else:
            occupied_ms, latency_ms = cost.occupied_ms + load_ms, cost.latency_ms + load_ms
        job.outcome.hit_tokens, job.outcome.hit_blocks = hit_tokens, held
        job.outcome.prefill_ms = cost.occupied_ms * self._num_nodes
        self.busy_ms += occupied_ms
        self._is_busy = True
        self._agenda.at(now + latency_ms / 1e3, lambda then: self._done(job, then))
        self._agenda.at(now + occupied_ms / 1e3, self._free)
        self._began(job, now)

    def _free(self, now: float) -> None:
        self._is_busy = False
        self._next(now)
