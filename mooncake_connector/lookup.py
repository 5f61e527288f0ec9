"""Asks the store how much of a prompt it holds, behind the scheduler's back.

The scheduler must not wait for the network: a question is put when a request arrives, and by the time the
request is scheduled the answer is there. If it is not, the step may wait a few milliseconds once; after that
the answer is "ask again" (None), until the question is too old and counts as a miss.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from kvcore import metrics
from kvcore.client.base import LayerwiseStore
from kvcore.keys import block_keys, variant_namespace
from mooncake_connector.counters import Counters

# An answer older than this is asked for again: blocks come and go while a request queues.
ANSWER_LIFETIME_SECONDS = 1.0


class _Question:
    def __init__(self, future: "Future[int]", first_block: int, asked: float) -> None:
        self.future = future
        self.first_block = first_block
        self.asked = asked
        self.is_awaited = False  # the scheduler has been told to come again for this answer


class PrefixLookup:
    """Of the scheduler's thread alone; one thread of its own talks to the store.

    `namespaces`: digests of all ranks; a block counts only if every rank's part of it is there.
    """

    def __init__(
        self,
        store: LayerwiseStore,
        namespaces: Sequence[bytes],
        counters: Counters,
        *,
        timeout_ms: float,
        step_wait_ms: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._namespaces = namespaces
        self._counters = counters
        self._timeout_ms = timeout_ms
        self._step_wait_ms = step_wait_ms
        self._clock = clock
        self._budget_ms = step_wait_ms
        self._questions: dict[str, _Question] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mooncake-lookup")

    def new_step(self) -> None:
        self._budget_ms = self._step_wait_ms

    def ask(self, request_id: str, variant: bytes, block_hashes: list[bytes], first_block: int = 0) -> None:
        """Starts looking for `block_hashes`, of which the first is the request's block `first_block`;
        replaces an earlier question of this request."""
        future = self._thread.submit(self._leading_hits, variant, block_hashes)
        self._questions[request_id] = _Question(future, first_block, self._clock())

    def answer(
        self,
        request_id: str,
        variant: bytes,
        hashes_from: Callable[[int], list[bytes]],
        first_block: int = 0,
    ) -> int | None:
        """How many blocks from `first_block` on are in the store without a gap; None: ask again.

        `hashes_from(first_block)` is called when a question has to be put: a long prompt has thousands, and
        one that waits for room is matched at every step. A store that does not answer within the time-out
        holds nothing (0).
        """
        question = self._questions.get(request_id)
        if question is None or question.first_block != first_block or self._is_stale(question):
            self.ask(request_id, variant, hashes_from(first_block), first_block)
            question = self._questions[request_id]
        if not question.future.done() and self._budget_ms > 0:
            started = self._clock()
            wait([question.future], self._budget_ms / 1e3)
            self._budget_ms -= (self._clock() - started) * 1e3
        if question.future.done():
            question.is_awaited = False
            return question.future.result()
        question.is_awaited = True
        if (self._clock() - question.asked) * 1e3 < self._timeout_ms:
            return None
        self._counters.add(metrics.LOOKUP_TIMEOUTS_TOTAL)
        return 0

    def forget(self, request_id: str) -> None:
        question = self._questions.pop(request_id, None)
        if question is not None:
            question.future.cancel()

    def abandon(self, variant: bytes, block_hashes: Sequence[bytes]) -> None:
        """Tells whoever follows these blocks that they will not come; does not wait."""
        for namespace in self._namespaces:
            keys = block_keys(variant_namespace(namespace, variant), block_hashes)
            self._thread.submit(self._store.abort, keys)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _is_stale(self, question: _Question) -> bool:
        # Not one that came too late for the last step: where steps take longer than an answer lives, a
        # request whose answers never come within a step would be asked about for ever.
        is_old = self._clock() - question.asked > ANSWER_LIFETIME_SECONDS
        return question.future.done() and is_old and not question.is_awaited

    def _leading_hits(self, variant: bytes, block_hashes: list[bytes]) -> int:
        hits = len(block_hashes)
        for namespace in self._namespaces:
            if hits == 0:
                break
            keys = block_keys(variant_namespace(namespace, variant), block_hashes[:hits])
            hits = self._store.lookup(keys, timeout_ms=self._timeout_ms).num_hits
        self._counters.add(metrics.LOOKUPS_TOTAL)
        return hits
