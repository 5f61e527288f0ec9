"""The remote as the store's loop uses it: bounded, with deadlines, and left alone while it is down."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path

from kvcore.wire.messages import Status, Tier
from store_server.core.tiering import Acceptance, ColdObject
from store_server.remote.backend import RemoteBackend, RemoteFailure
from store_server.remote.check import RemoteCheck
from store_server.remote.config import RemoteConfig
from store_server.remote.deletions import Deletions
from store_server.remote.doomed import DoomedKeys
from store_server.remote.format import CorruptObject, decode_into, encode, name_of, parse_name
from store_server.remote.guard import Guard
from store_server.remote.index import RemoteIndex
from store_server.remote.listing import Lister
from store_server.ssd import Dropped, Loaded, ReadRequest, WriteRequest, Written

logger = logging.getLogger(__name__)

_COUNTERS = ("written_objects", "written_bytes", "read_objects", "read_bytes", "corrupt", "deleted_objects")

Outcome = Written | Loaded | Dropped | list[bytes]
"""A list: keys that other stores have written."""


class RemoteTier:
    """Made and used in one loop. What has happened is told by `poll`, after `notify`. `on_listed` is called
    after each complete listing."""

    def __init__(
        self,
        config: RemoteConfig,
        backend: RemoteBackend,
        notify: Callable[[], None],
        on_listed: Callable[[], None],
    ) -> None:
        self._config = config
        self._backend = backend
        self._notify = notify
        self._on_listed = on_listed
        self._guard = Guard(config.public_url, config.timeout_ms / 1e3)
        self._deletions = Deletions(backend, self._guard)
        self._doomed = DoomedKeys()
        self._index = RemoteIndex(0)
        self._lister: Lister | None = None
        self._listing: asyncio.Task[None] | None = None
        self._outcomes: list[Outcome] = []
        self._reading = asyncio.Semaphore(config.num_requests)
        self._writing = asyncio.Semaphore(config.num_requests)
        self._writes: set[bytes] = set()
        self._cancelled: set[bytes] = set()
        self._in_flight_bytes = self._max_in_flight_bytes = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closing = self._has_given_up = False
        self._counters = dict.fromkeys(_COUNTERS, 0)

    # ---- life ------------------------------------------------------------------------------------------

    def read_notes(self, directories: Sequence[Path]) -> None:
        """Of what was removed and may still be there; it is written down there again. Blocks, before
        `open`."""
        self._doomed.open(directories, self._config.public_url)

    def open(self, max_in_flight_bytes: int, max_keys: int) -> None:
        """Begins to list what is there, and waits for nothing."""
        self._max_in_flight_bytes = max_in_flight_bytes
        self._index = RemoteIndex(max_keys)
        self._lister = Lister(
            self._backend,
            self._guard,
            self._index,
            self._config.refresh_ms / 1e3,
            lambda keys: self._tell(list(keys)),
            lambda keys: self._tell(Dropped(keys, "gone")),
            self._listed,
            self._is_wanted,
        )
        self._listing = asyncio.get_running_loop().create_task(self._lister.run())

    async def close(self, grace_s: float) -> None:
        """Writes what was accepted, for at most `grace_s` seconds; returns when nothing touches the buffers
        of requests any more. The last outcomes can still be polled."""
        self._is_closing = True
        if self._listing is not None:
            self._listing.cancel()
            await asyncio.gather(self._listing, return_exceptions=True)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace_s)
        self._has_given_up = True  # whatever still waits for its turn; what has begun ends with its deadline
        while self._tasks:
            await asyncio.wait(self._tasks)
        await self._deletions.close()
        unsure = [entry[0] for name in self._deletions if (entry := parse_name(name)) is not None]
        await asyncio.to_thread(self._doomed.close, unsure)
        await self._backend.close()

    # ---- asking ----------------------------------------------------------------------------------------

    @property
    def is_available(self) -> bool:
        return not self._guard.is_open

    @property
    def takes_writes(self) -> bool:
        has_room = self._in_flight_bytes < self._max_in_flight_bytes
        return self.is_available and has_room and not self._is_closing

    def find(self, key: bytes) -> ColdObject | None:
        """None as well while the remote is down: what cannot be read is not there."""
        return None if self._guard.is_open else self._index.find(key)

    def place(self, key: bytes) -> ColdObject | None:
        """As `find`, whether or not the remote can be read now."""
        return self._index.find(key)

    @property
    def in_flight_bytes(self) -> int:
        """Accepted, and not yet there."""
        return self._in_flight_bytes

    def has_room(self, size_bytes: int) -> bool:
        """Whether there is so much to its capacity, as far as this store knows."""
        capacity_bytes = self._config.capacity_bytes
        return not capacity_bytes or self._index.size_bytes + size_bytes <= capacity_bytes

    def __contains__(self, key: bytes) -> bool:
        return key in self._index

    def __len__(self) -> int:
        return len(self._index)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._index)

    @property
    def metadata_bytes(self) -> int:
        return self._index.memory_bytes

    def stats(self) -> dict[str, float]:
        return {
            "available": float(self.is_available),
            "objects": len(self._index),
            "live_bytes": self._index.size_bytes,
            "capacity_bytes": self._config.capacity_bytes,
            "in_flight_bytes": self._in_flight_bytes,
            "unindexed_objects": self._index.num_unknown,
            "deletions_pending": len(self._deletions),
            "metadata_bytes": self.metadata_bytes,
            "failures_total": self._guard.num_failures,
            "listings_total": self._lister.num_listings if self._lister is not None else 0,
            **{f"{name}_total": value for name, value in self._counters.items()},
        }

    # ---- work ------------------------------------------------------------------------------------------

    def write(self, request: WriteRequest) -> Acceptance:
        """Queue a write; a Written outcome follows. An object larger than what may be in flight goes
        alone."""
        size_bytes, capacity_bytes = request.size_bytes, self._config.capacity_bytes
        if not self.is_available or self._is_closing or 0 < capacity_bytes < size_bytes:
            return Acceptance.REFUSED
        in_flight_bytes = self._in_flight_bytes + size_bytes
        if self._in_flight_bytes and in_flight_bytes > self._max_in_flight_bytes:
            return Acceptance.BUSY
        name = name_of(request.key, request.num_layers, size_bytes)
        if request.key in self._writes or not self._deletions.keep(name):
            return Acceptance.BUSY
        self._doomed.discard(request.key)
        self._writes.add(request.key)
        self._in_flight_bytes = in_flight_bytes
        self._spawn(self._write(request, name))
        return Acceptance.QUEUED

    def read(self, request: ReadRequest) -> bool:
        """Queue a read; a Loaded outcome follows. False: not there, or the remote is down."""
        place = self.find(request.key)
        if place is None or self._is_closing:
            return False
        self._index.touch(request.key)
        self._spawn(self._read(request, name_of(request.key, place.num_layers, place.size_bytes)))
        return True

    def note_removal(self, keys: Sequence[bytes]) -> None:
        """A client has these removed. Those that this store does not know of, and all while the remote cannot
        be asked, go when a listing shows them."""
        if not self.trouble:
            keys = [key for key in keys if key not in self._index and key not in self._writes]
        self._doomed.add(keys, self._lister.num_begun if self._lister is not None else 0)

    def remove(self, keys: Sequence[bytes]) -> None:
        """Gone at once for this process, and for others when the remote has been told."""
        for key in keys:
            if key in self._writes:
                self._cancelled.add(key)
            place = self._index.remove(key)
            if place is not None:
                self._deletions.add(name_of(key, place.num_layers, place.size_bytes))
                self._counters["deleted_objects"] += 1

    def check(self) -> RemoteCheck:
        """Of all that is known to be there now, to be run."""
        return RemoteCheck(self._backend, self._guard, self._index, self._drop_corrupt, self._drop_gone)

    @property
    def trouble(self) -> str:
        """Why it cannot be said what is there; "" when it can."""
        if self._guard.is_open:
            return f"the remote is down ({self._guard.last_failure})"
        if self._lister is None or not self._lister.num_listings:
            return "the remote has not been listed yet" + (
                f" ({self._guard.last_failure})" if self._guard.last_failure else "; ask again in a while"
            )
        return ""

    def poll(self) -> list[Outcome]:
        """What happened since the last call."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    # ---- one request each ------------------------------------------------------------------------------

    async def _write(self, request: WriteRequest, name: str) -> None:
        status = Status.UNAVAILABLE
        async with self._writing:
            if self.is_available and not self._has_given_up:
                status = await self._put(request, name)
        key, size_bytes = request.key, request.size_bytes
        self._writes.remove(key)
        self._in_flight_bytes -= size_bytes
        if key in self._cancelled:
            self._cancelled.remove(key)
            self._deletions.add(name)
            status = Status.ABANDONED
        elif status is Status.OK:
            self._counters["written_objects"] += 1
            self._counters["written_bytes"] += size_bytes
            self._make_room(size_bytes)
            forgotten = self._index.add(key, ColdObject(size_bytes, request.num_layers, Tier.REMOTE))
            if forgotten:
                self._tell(Dropped(forgotten, "no room in the index"))
        self._tell(Written(request, status))

    async def _put(self, request: WriteRequest, name: str) -> Status:
        value = await asyncio.to_thread(
            encode, request.key, request.num_layers, request.buffers, request.checksums
        )
        try:
            await self._guard.call(self._backend.put(name, value))
        except RemoteFailure:
            return Status.UNAVAILABLE
        return Status.OK

    async def _read(self, request: ReadRequest, name: str) -> None:
        deadline = asyncio.get_running_loop().time() + self._guard.timeout_s
        async with self._reading:
            status, checksums = Status.UNAVAILABLE, list[int]()
            is_in_time = asyncio.get_running_loop().time() < deadline
            if is_in_time and self.is_available and not self._is_closing:
                status, checksums = await self._get(request, name)
        if status is Status.OK:
            self._counters["read_objects"] += 1
            self._counters["read_bytes"] += sum(map(len, request.buffers))
        self._tell(Loaded(request, status, checksums))

    async def _get(self, request: ReadRequest, name: str) -> tuple[Status, list[int]]:
        try:
            value = await self._guard.call(self._backend.get(name))
        except RemoteFailure:
            return Status.UNAVAILABLE, []
        if value is None:
            self._drop_gone(request.key)
            return Status.MISSING, []
        try:
            return Status.OK, await asyncio.to_thread(decode_into, value, request.key, request.buffers)
        except CorruptObject as error:
            self._drop_corrupt(request.key, name, str(error))
            return Status.CORRUPT, []

    def _drop_gone(self, key: bytes) -> None:
        self._index.remove(key)
        self._tell(Dropped([key], "gone"))

    def _drop_corrupt(self, key: bytes, name: str, reason: str) -> None:
        logger.error("an object on the remote is corrupt", extra={"object": name, "reason": reason})
        self._counters["corrupt"] += 1
        self.remove([key])
        self._tell(Dropped([key], "corrupt"))

    def _make_room(self, size_bytes: int) -> None:
        """Deletes what was used longest ago, as far as this store knows."""
        leaving: list[bytes] = []
        capacity_bytes = self._config.capacity_bytes
        while capacity_bytes and len(self._index) and self._index.size_bytes + size_bytes > capacity_bytes:
            leaving.append(self._index.oldest())
            self.remove(leaving[-1:])
        if leaving:
            self._tell(Dropped(leaving, "over capacity"))

    # ---- inside ----------------------------------------------------------------------------------------

    def _is_wanted(self, name: str) -> bool:
        """Of a name that a listing shows."""
        if name in self._deletions:
            return False
        if len(self._doomed):
            entry = parse_name(name)
            if entry is not None and entry[0] in self._doomed:
                self._deletions.add(name)
                self._counters["deleted_objects"] += 1
                return False
        return True

    def _listed(self) -> None:
        assert self._lister is not None
        self._doomed.listed(self._lister.num_begun, all_deleted=not len(self._deletions))
        self._on_listed()

    def _tell(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)
        if len(self._outcomes) == 1:
            self._notify()

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
