"""Carries out what Algorithm 1 decided to transfer, as far as it is not the engine's to do: blocks that the
source has on disk only are brought to its DRAM while the request waits in the queue, so that the engine's
connector finds them there.

Nobody waits for it, and a store that is slow or away costs a counter.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping

from kvcore.client.async_client import AsyncStoreClient
from kvcore.errors import KVError
from kvcore.wire.messages import Status
from router.core.cluster_book import ClusterBook
from router.core.decision import Transfer
from router.core.prefix_index import PrefixIndex
from router.core.view import RequestView

logger = logging.getLogger(__name__)

# Of one store at a time. What comes beyond is left to the engine, which reads from disk then.
MAX_RUNNING = 4
MAX_BLOCKS = 4096


class Prefetcher:
    """On the event loop's thread. `addresses`: of stores, by their ids in the cluster's book."""

    def __init__(
        self, book: ClusterBook, index: PrefixIndex | None, addresses: Mapping[str, str], token: str
    ) -> None:
        self.counts: Counter[str] = Counter()  # blocks, by what became of them
        self._book = book
        self._index = index
        self._addresses = addresses
        self._token = token
        self._clients: dict[str, AsyncStoreClient] = {}
        self._opening = asyncio.Lock()
        self._complained: set[str] = set()
        self._running: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_running(self) -> int:
        return len(self._tasks)

    def begin(self, request: RequestView, transfer: Transfer) -> None:
        """At once; for a source whose address is not known there is nothing to do."""
        source, worker = transfer.source, self._book.worker_of(transfer.source)
        if self._index is None or worker is None or source not in self._addresses:
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
            client = await self._client(source)
            keys = await client.resolve(names)
            statuses = await client.prefetch(keys) if keys else []
            for status in statuses:
                self.counts["fetched" if status is Status.OK else "missing"] += 1
            self.counts["unknown"] += max(0, len(names) - len(keys))
        except (KVError, OSError) as error:
            self.counts["failed"] += len(names)
            if source not in self._complained:
                self._complained.add(source)
                logger.warning("nothing can be fetched ahead: %s", error, extra={"store": source})
        finally:
            self._running[source] -= 1

    async def _client(self, source: str) -> AsyncStoreClient:
        async with self._opening:
            if source not in self._clients:
                self._clients[source] = await AsyncStoreClient.connect(
                    self._addresses[source], token=self._token, client_name="mooncake-router"
                )
        return self._clients[source]

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for client in self._clients.values():
            await client.close()
