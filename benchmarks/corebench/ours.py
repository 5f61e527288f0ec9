"""Our router's core in a process of its own: index, events by ZMQ, Algorithm 1, the book."""

from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import zmq

import router.core.block_table
from corebench.inputs import BLOCK_TOKENS, Inputs, stored
from corebench.serving import Operation, cpu_us, serve
from kvcore.wire.events import Medium
from router.cli import calm_garbage_collector
from router.core.block_hash import block_hashes
from router.core.cluster_book import ClusterBook
from router.core.decision import Choice, Decision
from router.core.event_feed import EventFeed
from router.core.policies import make_policy
from router.core.prefix_index import PrefixIndex
from router.core.scheduler import Scheduler
from router.core.settings import Settings
from router.core.view import RequestView, Role
from router.kv_events.source import EventSource
from router.kv_events.subscriber import Subscriber

_OUTPUT_TOKENS = 300
_NOW = 1.0


class Ours:
    """Each worker is a mixed engine. `early` with SLOs that nobody misses: all is predicted and compared."""

    def __init__(self) -> None:
        settings = Settings(admission="early", ttft_slo_ms=1e9, tbt_slo_ms=1e9)
        self._index = PrefixIndex(BLOCK_TOKENS)
        self._book = ClusterBook(settings, self._index)
        policies = make_policy("global_cache_aware", settings), make_policy("least_tbt", settings)
        self._scheduler = Scheduler(*policies, settings)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._subscribers: dict[int, Subscriber] = {}
        self._numbers: dict[int, int] = {}  # in the index, by number of the worker
        self._operations: dict[str, Operation] = {}
        self._inputs: Inputs | None = None
        calm_garbage_collector()  # as the router does

    def is_compiled(self) -> bool:
        return not router.core.block_table.__file__.endswith(".py")

    def follow(self, worker: int, endpoint: str) -> None:
        number = self._book.add_instance(
            f"http://10.0.0.{worker}:8000", Role.MIXED, kv_capacity_tokens=1 << 20, is_shared=True
        )
        subscriber = Subscriber(self._context, EventSource(endpoint), EventFeed(self._index, number))
        subscriber.start()
        self._numbers[worker], self._subscribers[worker] = number, subscriber

    def depths(self, token_ids: list[int]) -> dict[int, int]:
        """Leading blocks that each worker holds, by its events."""
        match = self._index.match(block_hashes(token_ids, BLOCK_TOKENS), _NOW)
        return {worker: match.depth_on(number, Medium.GPU) for worker, number in self._numbers.items()}

    def prepare(self, path: str) -> list[str]:
        """From here on the inputs of that file are measured with; the names of what can be."""
        given = self._inputs = msgspec.json.decode(Path(path).read_bytes(), type=Inputs)
        own = block_hashes(given.token_ids, BLOCK_TOKENS)
        self._operations["hash"] = partial(block_hashes, given.token_ids, BLOCK_TOKENS)
        states = self._book.view(_NOW).mixed
        for what, depths in given.depths.items():
            index = PrefixIndex(BLOCK_TOKENS)
            for depth in depths:
                worker = index.add_worker(f"w{len(index.worker_ids)}", shared=True)
                index.apply(worker, [stored(given.names[:depth], given.token_ids[: depth * BLOCK_TOKENS])])
            self._operations[f"lookup, {what}"] = _lookup(index, own, states)
        self._operations["lookup, miss"] = _lookup(index, [h ^ 1 for h in own], states)
        self._operations["choose, token ids"] = self._choose
        self._operations["choose, hashes"] = partial(self._choose, own)
        self._operations["choose and book"] = self._choose_and_book
        return list(self._operations)

    def load(self) -> None:
        """Puts requests on every worker, half of them decoding."""
        assert self._inputs is not None
        states = self._book.view(_NOW).mixed
        for number, prompt in enumerate(self._inputs.under_way):
            state = states[number % len(states)]
            hashes = block_hashes(prompt, BLOCK_TOKENS)
            request = RequestView(f"loaded{number}", len(prompt), hashes, _OUTPUT_TOKENS)
            choice = Choice(state, "load", compute_ms=50.0)
            self._book.sent(request, Decision(decode=state, prefill_choice=choice), _NOW)
            if number // len(states) % 2:
                self._book.first_token(request.request_id, _NOW)

    async def measure(self, what: str, min_s: float) -> float:
        return await cpu_us(self._operations[what], min_s)

    async def close(self) -> None:
        for subscriber in self._subscribers.values():
            subscriber.close()
        self._context.term()

    def _request(self, hashes: list[int] | None) -> RequestView:
        assert self._inputs is not None
        token_ids = self._inputs.token_ids
        known = block_hashes(token_ids, BLOCK_TOKENS) if hashes is None else hashes
        return RequestView("r", len(token_ids), known, _OUTPUT_TOKENS)

    def _choose(self, hashes: list[int] | None = None) -> object:
        return self._scheduler.schedule(self._request(hashes), self._book.view(_NOW), _NOW)

    def _choose_and_book(self) -> None:
        request = self._request(None)
        decision = self._scheduler.schedule(request, self._book.view(_NOW), _NOW)
        self._book.sent(request, decision, _NOW)
        self._book.first_token("r", _NOW)
        self._book.ended("r", _NOW)


def _lookup(index: PrefixIndex, hashes: list[int], states: Any) -> Operation:
    """How much of the prompt each worker holds."""
    return lambda: index.match(hashes, _NOW).local_blocks_of(states)


if __name__ == "__main__":
    serve(Ours)
