"""Has stores copy prefixes from each other, as router.core.replication plans it.

A store that is slow, full or away costs a counter, and is left alone for a while.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from kvcore.errors import KVError
from kvcore.wire.messages import Status
from router.core.cluster_book import ClusterBook
from router.core.decision import Decision, Transfer
from router.core.prefix_index import PrefixIndex
from router.core.replication import CopyPlan, parents_of, plan_copy
from router.core.settings import Settings
from router.core.view import RequestView
from router.store_links import StoreLinks

# To one store at a time, and of one prefix. What comes beyond is computed.
MAX_RUNNING = 4
MAX_BLOCKS = 4096
# Until a pair of stores between which a copy failed is tried again; requests would wait for it.
PAUSE_S = 10.0
_TROUBLE = "prefixes are not copied"
# For events that usually take ten milliseconds.
_LOOKS, _LOOK_PAUSE_S = 20, 0.005


class Copying(NamedTuple):
    """The request that wants it should wait for `task`, which raises nothing, up to `wait_ms`; 0: not."""

    task: "asyncio.Task[None]"
    wait_ms: float


class PrefixCopier:
    """On the event loop's thread."""

    def __init__(self, book: ClusterBook, index: PrefixIndex | None, links: StoreLinks) -> None:
        self.counts: Counter[str] = Counter()  # blocks, by what became of them
        self._book = book
        self._index = index
        self._links = links
        self._running: dict[tuple[str, int], asyncio.Task[None]] = {}  # by target and last block
        self._paused_until: dict[tuple[str, str], float] = {}

    @property
    def num_running(self) -> int:
        return len(self._running)

    def begin(self, request: RequestView, decision: Decision, settings: Settings) -> Copying | None:
        """The copy that this decision asks for, or one of the same blocks that is under way; None when there
        is nothing to copy, or not now."""
        index, transfer = self._index, decision.transfer
        if index is None or transfer is None:
            return None
        target_store = self._book.store_node_of(transfer.target)
        plan = plan_copy(request, decision, target_store, index.block_size_tokens, settings)
        if plan is None or not {plan.source, plan.target} <= self._links.addresses.keys():
            return None
        task = self._task(request, transfer, plan, index)
        return Copying(task, plan.wait_ms) if task is not None else None

    def _task(
        self, request: RequestView, transfer: Transfer, plan: CopyPlan, index: PrefixIndex
    ) -> "asyncio.Task[None] | None":
        name = (plan.target, request.block_hashes[plan.num_blocks - 1])
        if (task := self._running.get(name)) is not None:
            return task
        loop = asyncio.get_running_loop()
        num_blocks = plan.num_blocks - plan.first_block
        is_paused = self._paused_until.get((plan.source, plan.target), 0.0) > loop.time()
        if is_paused or sum(target == plan.target for target, _ in self._running) >= MAX_RUNNING:
            self.counts["left"] += num_blocks
            return None
        self.counts["left"] += max(0, num_blocks - MAX_BLOCKS)
        wanted = request.block_hashes[plan.first_block : plan.num_blocks][:MAX_BLOCKS]
        worker = self._book.worker_of(plan.source)
        names = index.held_blocks(worker, wanted) if worker is not None else []
        if not names:
            return None
        self._book.transfer_started(transfer)
        task = self._running[name] = loop.create_task(self._copy(plan, names))

        def ended(_: "asyncio.Task[None]") -> None:
            del self._running[name]
            self._book.transfer_ended(transfer)

        task.add_done_callback(ended)
        return task

    async def _copy(self, plan: CopyPlan, names: Sequence[int]) -> None:
        try:
            keys = await self._links.resolve(plan.source, names)
            if keys is None:
                self._failed(plan, len(names), "the source cannot be asked")
                return
            statuses: list[Status] = []
            if keys:
                target = await self._links.client(plan.target)
                statuses = await target.copy_from(
                    keys,
                    self._links.addresses[plan.source],
                    parents=parents_of(keys),
                    wait_ms=max(int(plan.wait_ms), 1),
                )
        except (KVError, OSError) as error:
            self._failed(plan, len(names), error)
            return
        self.counts["unknown"] += max(0, len(names) - len(keys))
        outcomes = Counter(statuses)
        if outcomes[Status.OK]:
            await self._until_seen(plan.target, names[-1])
        self.counts["copied"] += outcomes.pop(Status.OK, 0)
        self.counts["late"] += outcomes.pop(Status.PENDING, 0)
        self.counts["missing"] += outcomes.pop(Status.MISSING, 0)
        self.counts["full"] += outcomes.pop(Status.FULL, 0) + outcomes.pop(Status.TOO_LARGE, 0)
        if outcomes:
            self._failed(plan, outcomes.total(), min(outcomes).name)

    async def _until_seen(self, target: str, name: int) -> None:
        """The store's events say what it has got a moment later than its answer; decided anew before that,
        the request could go to an engine that has nothing of it."""
        worker = self._book.worker_of(target)
        for _ in range(_LOOKS):
            if worker is None or self._index is None or self._index.holds(worker, name):
                return
            await asyncio.sleep(_LOOK_PAUSE_S)

    def _failed(self, plan: CopyPlan, num_blocks: int, reason: object) -> None:
        self.counts["failed"] += num_blocks
        self._paused_until[plan.source, plan.target] = asyncio.get_running_loop().time() + PAUSE_S
        self._links.complain(plan.target, _TROUBLE, reason)

    async def close(self) -> None:
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
