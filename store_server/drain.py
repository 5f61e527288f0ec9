"""The end of a store's life with nothing lost: DRAM goes to the level below, readers are still served."""

import asyncio
import contextlib
import logging
from collections.abc import Callable

from kvcore.clock import Clock
from kvcore.wire.messages import DrainReply
from store_server.core.objects import StoredObject
from store_server.core.store import Store
from store_server.core.tiering import Fate

logger = logging.getLogger(__name__)

_POLL_S = 0.5


class Drainer:
    """`start` (or `save`, with a deadline) in the store's loop. `progressed` must be called whenever a write
    to the SSD has ended. `on_done`: a drain that was asked to stop the process is done."""

    def __init__(self, store: Store, clock: Clock, on_done: Callable[[], None]) -> None:
        self._store = store
        self._clock = clock
        self._on_done = on_done
        self._progress = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_done = self._stops = False
        self._unsaved: list[StoredObject] = []
        self._unsaved_bytes = 0
        self._refused: set[StoredObject] = set()

    @property
    def is_draining(self) -> bool:
        return self._task is not None

    def progressed(self) -> None:
        self._progress.set()

    def start(self, *, stop: bool) -> None:
        """From now on writers find the store full. Asking again changes nothing, except that `stop` is not
        taken back."""
        self._stops = self._stops or stop
        if self._task is None:
            logger.info("draining: no new objects are taken")
            self._store.writes.is_draining = True
            self._task = asyncio.get_running_loop().create_task(self._drain())
        elif self._is_done and stop:
            self._on_done()

    def report(self) -> DrainReply:
        in_flight = self._store.space.write_back
        return DrainReply(
            0,
            self._is_done,
            len(self._unsaved) + in_flight.num_in_flight,
            self._unsaved_bytes + in_flight.in_flight_bytes,
            self._store.writes.num_pending,
            len(self._refused),
        )

    async def save(self, timeout_s: float) -> None:
        """For a stop without a drain: what is in DRAM only goes to the SSD, as far as time allows."""
        await self.cancel()
        deadline = self._clock.now() + timeout_s
        num_objects = await self._save_all(deadline)
        logger.info(
            "DRAM saved",
            extra={"objects": num_objects, "not_saved": len(self._unsaved) + len(self._refused)},
        )

    async def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _drain(self) -> None:
        store = self._store
        while True:
            await self._save_all(float("inf"))
            if not store.space.write_back.num_in_flight and not store.writes.num_pending and not self._left():
                break
            await self._wait()
        self._is_done = True
        logger.info("drained", extra={"not_saved": len(self._refused)})
        if self._stops:
            self._on_done()

    def _left(self) -> list[StoredObject]:
        return [obj for obj in self._store.space.dram_only() if obj not in self._refused]

    async def _save_all(self, deadline: float) -> int:
        """How many objects there were to save. Those the SSD does not take are in `_refused`."""
        self._refused = {obj for obj in self._refused if not obj.gone}
        self._unsaved = self._left()[::-1]
        self._unsaved_bytes = sum(obj.size_bytes for obj in self._unsaved)
        num_objects = len(self._unsaved)
        while self._unsaved:
            obj = self._unsaved[-1]
            fate = self._store.space.save(obj)
            if fate is Fate.WAIT:
                if self._clock.now() >= deadline:
                    break
                await self._wait()
                continue
            self._unsaved.pop()
            self._unsaved_bytes -= obj.size_bytes
            if fate is Fate.REFUSED:
                self._refused.add(obj)
        return num_objects

    async def _wait(self) -> None:
        self._progress.clear()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._progress.wait(), _POLL_S)
