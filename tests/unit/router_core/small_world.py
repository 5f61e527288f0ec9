"""A cluster of prefill and decode instances small enough to read, driven by the core under a virtual clock.

It is no performance model (that is the simulator): it shows that the parts fit together, and that policies
come out in the order the paper found.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvcore.wire.events import BlockRemoved, BlockStored, Medium
from router.core.block_hash import block_hashes
from router.core.cluster_book import ClusterBook
from router.core.decision import Decision
from router.core.policies import make_policy
from router.core.prefix_index import PrefixIndex
from router.core.prng import SplitMix64
from router.core.scheduler import Scheduler
from router.core.settings import Settings
from router.core.view import RequestView, Role

BLOCK = 128


class Prompt:
    """A document and a question about it."""

    def __init__(self, document: int, number: int, document_blocks: int, question_tokens: int) -> None:
        self.document = document
        shared = [document] * (document_blocks * BLOCK)
        self.token_ids = shared + [100_000 + number] * question_tokens
        self.hashes = block_hashes(self.token_ids, BLOCK)
        self.document_blocks = document_blocks


class PrefillNode:
    """Computes one prompt at a time, in order; its local tier holds `capacity` documents, LRU."""

    def __init__(self, worker: int, capacity: int) -> None:
        self.worker = worker
        self.capacity = capacity
        self.waiting: deque[Job] = deque()
        self.is_busy = False
        self.documents: OrderedDict[int, None] = OrderedDict()


class Job(NamedTuple):
    request: RequestView
    prompt: Prompt
    decision: Decision
    number: int
    arrived_at: float


class SmallWorld:
    def __init__(
        self,
        prefill_policy: str,
        settings: Settings,
        num_prefill: int = 4,
        num_decode: int = 4,
        documents_per_node: int = 8,
        output_tokens: Callable[[int], int] = lambda number: 1,
    ) -> None:
        self.settings = settings
        self.index = PrefixIndex(BLOCK)
        self.book = ClusterBook(settings, self.index)
        self.nodes: dict[str, PrefillNode] = {}
        for n in range(num_prefill):
            worker = self.book.add_instance(f"p{n}", Role.PREFILL, is_shared=True)
            self.nodes[f"p{n}"] = PrefillNode(worker, documents_per_node)
        for n in range(num_decode):
            self.book.add_instance(f"d{n}", Role.DECODE)
        self.decoding: dict[str, dict[str, int]] = {f"d{n}": {} for n in range(num_decode)}
        self.scheduler = Scheduler(
            make_policy(prefill_policy, settings), make_policy("least_tbt", settings), settings
        )
        self.output_tokens = output_tokens
        self.fetches = prefill_policy == "global_cache_aware"
        self.ttfts_ms: list[float] = []
        self.tbts_ms: list[float] = []
        self.num_rejected = self.num_wasted_prefills = self.num_transfers = 0
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()

    def run(self, arrivals: Sequence[tuple[float, Prompt]]) -> None:
        for number, (at, prompt) in enumerate(arrivals):
            self._at(at, lambda now, n=number, p=prompt: self._arrive(n, p, now))
        while self._events:
            now, _, happen = heapq.heappop(self._events)
            happen(now)

    def _at(self, at: float, happen: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (at, next(self._order), happen))

    def _arrive(self, number: int, prompt: Prompt, now: float) -> None:
        request = RequestView(f"r{number}", len(prompt.token_ids), prompt.hashes)
        decision = self.scheduler.schedule(request, self.book.view(now), now)
        if decision.reject is not None or decision.prefill is None:
            self.num_rejected += 1
            return
        self.book.sent(request, decision, now)
        self.num_transfers += decision.transfer is not None
        node = self.nodes[decision.prefill.instance_id]
        node.waiting.append(Job(request, prompt, decision, number, now))
        self._work(node, now)

    def _work(self, node: PrefillNode, now: float) -> None:
        if node.is_busy or not node.waiting:
            return
        node.is_busy = True
        job = node.waiting.popleft()
        document, blocks = job.prompt.document, job.prompt.document_blocks
        prefix_blocks, transfer_ms = 0, 0.0
        if document in node.documents:
            prefix_blocks = blocks
        elif self.fetches and any(document in other.documents for other in self.nodes.values()):
            prefix_blocks = blocks
            transfer_ms = self.settings.transfer_model.remote_ms(blocks * BLOCK, Medium.CPU)
        model = self.settings.prefill_model
        compute_ms = model.compute_ms(job.request.prompt_tokens, prefix_blocks * BLOCK)
        self._at(now + (transfer_ms + compute_ms) / 1e3, lambda then: self._prefilled(node, job, then))

    def _prefilled(self, node: PrefillNode, job: Job, now: float) -> None:
        self.ttfts_ms.append((now - job.arrived_at) * 1e3)
        self._remember(node, job.prompt)
        node.is_busy = False
        self._work(node, now)
        request_id = job.request.request_id
        view = self.book.view(now)
        decode = next(d for d in view.decode if d.instance_id == job.decision.decode.instance_id)
        rejection = self.scheduler.after_prefill(job.request, decode, view, now)
        self.book.first_token(request_id, now)
        if rejection is not None:
            self.num_rejected += 1
            self.num_wasted_prefills += 1
            self.book.ended(request_id, now)
            return
        running = self.decoding[decode.instance_id]
        running[request_id] = job.request.prompt_tokens
        tbt_ms = self.settings.decode_model.tbt_ms(len(running), sum(running.values()))
        self.tbts_ms.append(tbt_ms)
        output_tokens = self.output_tokens(job.number)

        def done(then: float) -> None:
            del running[request_id]
            self.book.ended(request_id, then, output_tokens)

        self._at(now + output_tokens * tbt_ms / 1e3, done)

    def _remember(self, node: PrefillNode, prompt: Prompt) -> None:
        names = prompt.hashes[: prompt.document_blocks]  # any names will do: ours
        node.documents[prompt.document] = None
        node.documents.move_to_end(prompt.document)
        tokens = prompt.token_ids[: prompt.document_blocks * BLOCK]
        self.index.apply(node.worker, [BlockStored(names, None, tokens, BLOCK, Medium.CPU)])
        if len(node.documents) > node.capacity:
            document, _ = node.documents.popitem(last=False)
            gone = block_hashes([document] * len(tokens), BLOCK)
            self.index.apply(node.worker, [BlockRemoved(gone[::-1], Medium.CPU)])


@functools.lru_cache(maxsize=4)
def skewed_arrivals(
    count: int, per_second: float, documents: int, document_blocks: int, seed: int
) -> list[tuple[float, Prompt]]:
    """Poisson arrivals; document k is asked about in proportion to 1 / (k + 1)."""
    prng = SplitMix64(seed)
    weights = list(itertools.accumulate(1 / (k + 1) for k in range(documents)))
    at, arrivals = 0.0, []
    for number in range(count):
        uniform = (prng.next_u64() + 1) / 2**64
        at += -math.log(uniform) / per_second
        drawn = prng.next_u64() / 2**64 * weights[-1]
        document = next(k for k, reached in enumerate(weights) if drawn <= reached)
        arrivals.append((at, Prompt(document, number, document_blocks, 64)))
    return arrivals
