"""Carries out what Algorithm 1 decided to transfer, as far as it is not the engine's to do: blocks that the
source has on disk only are brought to its DRAM while the request waits in the queue, so that the engine's
connector finds them there.

Nobody waits for it, and a store that is slow or away costs a counter.
"""

import asyncio
from collections import Counter

from kvcore.errors import KVError
from kvcore.wire.messages import Status
from router.core.cluster_book import ClusterBook
from router.core.decision import Transfer
from router.core.prefix_index import PrefixIndex
from router.core.view import RequestView
from router.store_links import StoreLinks

# Of one store at a time. What comes beyond is left to the engine, which reads from disk then.
MAX_RUNNING = 4
MAX_BLOCKS = 4096


class Prefetcher:
    """On the event loop's thread."""

    def __init__(self, book: ClusterBook, index: PrefixIndex | None, links: StoreLinks) -> None:
        self.counts: Counter[str] = Counter()  # blocks, by what became of them
        self._book = book
        self._index = index
        self._links = links
        self._running: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_running(self) -> int:
        return len(self._tasks)

    def begin(self, request: RequestView, transfer: Transfer) -> None:
        """At once; for a source whose address is not known there is nothing to do."""
        source, worker = transfer.source, self._book.worker_of(transfer.source)
        if self._index is None or worker is None or source not in self._links.addresses:
            return
        wanted = request.block_hashes[transfer.first_block : transfer.num_blocks]
        names = self._index.slow_blocks(worker, wanted)
        if not names:
            return
        if self._running[source] >= MAX_RUNNING:
            self.counts["left"] += len(names)
            return
        self.counts["left"] += max(0, len(names) - MAX_BLOCKS)
        self._running[source] += 1
        task = asyncio.get_running_loop().create_task(self._prefetch(source, list(names[:MAX_BLOCKS])))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _prefetch(self, source: str, names: list[int]) -> None:
        try:
            client = await self._links.client(source)
            keys = await self._links.resolve(source, names) or []
            statuses = await client.prefetch(keys) if keys else []
            for status in statuses:
                self.counts["fetched" if status is Status.OK else "missing"] += 1
            self.counts["unknown"] += max(0, len(names) - len(keys))
        except (KVError, OSError) as error:
            self.counts["failed"] += len(names)
            self._links.complain(source, "nothing can be fetched ahead", error)
        finally:
            self._running[source] -= 1

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
