"""Reads back what is known to be on the remote, not faster than asked, and checks every byte."""

import asyncio
import logging
from collections.abc import Callable, Iterator

from kvcore.wire.messages import CheckedLevel, Tier
from store_server.remote.backend import RemoteBackend, RemoteFailure
from store_server.remote.format import CorruptObject, check, name_of
from store_server.remote.guard import Guard
from store_server.remote.index import RemoteIndex

logger = logging.getLogger(__name__)

_AT_ONCE = 4  # bounds memory, and leaves the remote to those who wait for an object


class RemoteCheck:
    """One check, in the store's loop. `on_corrupt` and `on_gone` get the key of an object that must not be
    found any more. The counts may be looked at meanwhile; `num_done` includes the others, and what was
    removed before its turn."""

    def __init__(
        self,
        backend: RemoteBackend,
        guard: Guard,
        index: RemoteIndex,
        on_corrupt: Callable[[bytes, str, str], None],
        on_gone: Callable[[bytes], None],
    ) -> None:
        self._backend = backend
        self._guard = guard
        self._index = index
        self._on_corrupt = on_corrupt
        self._on_gone = on_gone
        self._keys: Iterator[bytes] = iter(list(index))
        self._free_at = 0.0
        self.num_objects = len(index)
        self.num_done = self.num_corrupt = self.num_unread = 0
        self.last_failure = ""

    @property
    def level(self) -> CheckedLevel:
        return CheckedLevel(Tier.REMOTE, self.num_objects, self.num_done, self.num_corrupt, self.num_unread)

    @property
    def trouble(self) -> str:
        """Why not all could be read; "" when all were."""
        return f"the remote does not give them ({self.last_failure})" if self.num_unread else ""

    async def run(self, bytes_per_s: int) -> None:
        """Returns when all have been looked at; when the remote is found to be down, the rest is not."""
        workers = [asyncio.ensure_future(self._work(bytes_per_s)) for _ in range(_AT_ONCE)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _work(self, bytes_per_s: int) -> None:
        for key in self._keys:
            place = self._index.find(key)
            if place is not None:
                await self._take_turn(place.size_bytes / bytes_per_s)
                if self._guard.is_open:
                    self._give_up()
                    return
                await self._check(key, name_of(key, place.num_layers, place.size_bytes))
            self.num_done += 1

    def _give_up(self) -> None:
        """On the one in hand and on those that nobody has begun."""
        num_left = 1 + sum(1 for _ in self._keys)
        self.num_done += num_left
        self.num_unread += num_left
        self.last_failure = self._guard.last_failure

    async def _take_turn(self, cost_s: float) -> None:
        now = asyncio.get_running_loop().time()
        begin = max(self._free_at, now)
        self._free_at = begin + cost_s
        await asyncio.sleep(begin - now)

    async def _check(self, key: bytes, name: str) -> None:
        try:
            value = await self._guard.call(self._backend.get(name))
        except RemoteFailure as error:
            self.num_unread += 1
            self.last_failure = str(error)
            return
        if value is None:
            self._on_gone(key)
            return
        try:
            await asyncio.to_thread(check, value, key)
        except CorruptObject as error:
            self.num_corrupt += 1
            self._on_corrupt(key, name, str(error))
