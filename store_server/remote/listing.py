"""Keeps the index near what is really on the remote: other stores write there as well, and rules delete."""

import asyncio
from collections.abc import Callable, Sequence

from store_server.remote.backend import RemoteBackend, RemoteFailure
from store_server.remote.guard import Guard
from store_server.remote.index import RemoteIndex

Tell = Callable[[Sequence[bytes]], None]


class Lister:
    """Lists all names, again and again, `refresh_s` after the end of the last time. It is also what finds out
    that a remote is back: while the guard is open nobody else asks. `on_found` and `on_gone` get keys.
    `is_wanted` is asked about each name that is shown; what is not counts as not there."""

    def __init__(
        self,
        backend: RemoteBackend,
        guard: Guard,
        index: RemoteIndex,
        refresh_s: float,
        on_found: Tell,
        on_gone: Tell,
        on_complete: Callable[[], None],
        is_wanted: Callable[[str], bool],
    ) -> None:
        self._backend = backend
        self._guard = guard
        self._index = index
        self._refresh_s = refresh_s
        self._on_found = on_found
        self._on_gone = on_gone
        self._on_complete = on_complete
        self._is_wanted = is_wanted
        self.num_listings = 0
        self.num_begun = 0

    async def run(self) -> None:
        while True:
            is_complete = await self._list_all()
            if is_complete:
                self.num_listings += 1
                self._on_complete()
            await self._pause(self._refresh_s if is_complete else self._guard.pause_s)

    async def _pause(self, pause_s: float) -> None:
        """Cut short when the remote goes down: then the next listing is the question whether it is back."""
        if not self._guard.is_open:
            try:
                await asyncio.wait_for(self._guard.opened.wait(), pause_s)
            except asyncio.TimeoutError:
                return
        await asyncio.sleep(self._guard.pause_s)

    async def _list_all(self) -> bool:
        self.num_begun += 1
        self._index.listing_begins()
        is_complete = False
        pages = self._backend.list()
        try:
            while (page := await self._guard.call(anext(pages, None))) is not None:
                found = self._index.listed(filter(self._is_wanted, page))
                if found:
                    self._on_found(found)
            is_complete = True
        except RemoteFailure:
            pass
        finally:
            gone = self._index.listing_ends(is_complete)
        if gone:
            self._on_gone(gone)
        return is_complete
