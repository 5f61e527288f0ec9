"""Names that are to go from the remote: in batches, and again after a failure."""

import asyncio
import contextlib
from collections.abc import Iterator
from itertools import islice

from store_server.remote.backend import RemoteBackend, RemoteFailure
from store_server.remote.guard import Guard

_BATCH = 1000  # what S3 deletes in one request
MAX_PENDING = 100_000  # beyond it the oldest are left where they are


class Deletions:
    """Used in one loop."""

    def __init__(self, backend: RemoteBackend, guard: Guard) -> None:
        self._backend = backend
        self._guard = guard
        self._pending: dict[str, None] = {}
        self._deleting: dict[str, None] = {}
        self._task: asyncio.Task[None] | None = None

    def __contains__(self, name: str) -> bool:
        """It is to go, whatever a listing says."""
        return name in self._pending or name in self._deleting

    def __iter__(self) -> Iterator[str]:
        return iter(self._pending)

    def __len__(self) -> int:
        return len(self._pending) + len(self._deleting)

    def add(self, name: str) -> None:
        self._pending[name] = None
        if len(self._pending) > MAX_PENDING:
            del self._pending[next(iter(self._pending))]
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def keep(self, name: str) -> bool:
        """It is about to be written again. False: it is being deleted this moment."""
        self._pending.pop(name, None)
        return name not in self._deleting

    async def close(self) -> None:
        """Tries what is left once; a remote that is down keeps it."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._pending = dict.fromkeys([*self._deleting, *self._pending])
        with contextlib.suppress(RemoteFailure):
            while self._pending and not self._guard.is_open:
                await self._delete_some()

    async def _run(self) -> None:
        while self._pending:
            try:
                if not self._guard.is_open:
                    await self._delete_some()
                    continue
            except RemoteFailure:
                pass
            await asyncio.sleep(self._guard.pause_s)
        self._task = None

    async def _delete_some(self) -> None:
        self._deleting = dict.fromkeys(islice(self._pending, _BATCH))
        for name in self._deleting:
            del self._pending[name]
        try:
            await self._guard.call(self._backend.delete(list(self._deleting)))
        except RemoteFailure:
            self._pending = dict.fromkeys([*self._deleting, *self._pending])
            raise
        finally:
            self._deleting = {}
