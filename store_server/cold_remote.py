"""The remote level as the core sees it."""

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kvcore.metrics import REMOTE_PREFIX
from kvcore.units import format_size
from kvcore.wire.messages import Status, Tier
from store_server.cold import given_checksums, views_of
from store_server.core.objects import StoredObject
from store_server.core.owners import Quota
from store_server.core.placements import PlacementLog
from store_server.core.store import Store
from store_server.core.tiering import Acceptance, ColdObject
from store_server.level_quotas import LevelQuotas
from store_server.remote import RemoteConfig, RemoteTier
from store_server.remote.backend import make_backend
from store_server.remote.check import RemoteCheck
from store_server.remote.index import BYTES_PER_KEY
from store_server.ssd import Dropped, Loaded, ReadRequest, WriteRequest, Written

logger = logging.getLogger(__name__)

MAX_IN_FLIGHT_BYTES = 64 << 20
_INDEX_SHARE = 16  # of the pool: a remote may hold any number of objects


class RemoteColdTier:
    """A `ColdTier`, used in the store's loop. `notify` is called when `poll` has something to do, `on_listed`
    when a listing of the whole remote has ended. What a tenant writes makes its own oldest leave the remote,
    of those that this store knows of, when that is more than its quota."""

    def __init__(
        self,
        config: RemoteConfig,
        notify: Callable[[], None],
        on_listed: Callable[[], None],
        placements: PlacementLog | None = None,
        quotas: Sequence[Quota] = (),
    ) -> None:
        self._config = config
        self._tier = RemoteTier(config, make_backend(config), notify, on_listed)
        self._placements = placements
        self.quotas = LevelQuotas({quota.prefix: quota.remote_bytes for quota in quotas})
        self._pool = memoryview(b"")

    def read_notes(self, directories: Sequence[Path]) -> None:
        """Of removals that the remote may not have been told of. Blocks, before `open`."""
        self._tier.read_notes(directories)

    def open(self, pool: memoryview) -> None:
        self._pool = pool
        self._tier.open(min(MAX_IN_FLIGHT_BYTES, len(pool) // 4), len(pool) // _INDEX_SHARE // BYTES_PER_KEY)
        limit_bytes = self._config.capacity_bytes
        logger.info(
            "remote level",
            extra={
                "remote": self._config.public_url,
                "capacity": format_size(limit_bytes) if limit_bytes else "",
            },
        )

    async def close(self, grace_s: float) -> None:
        """What was accepted is written within `grace_s`; no byte of the pool is touched afterwards."""
        await self._tier.close(grace_s)
        self._pool = memoryview(b"")

    def poll(self, store: Store) -> None:
        """Tells the core what has happened."""
        for outcome in self._tier.poll():
            if isinstance(outcome, Written):
                if outcome.status is Status.OK:
                    self._count_written(store, outcome.request.key)
                token = outcome.request.token
                if isinstance(token, StoredObject):
                    store.space.written(token, outcome.status)
                else:
                    token(outcome)
            elif isinstance(outcome, Loaded):
                status = Status.MISSING if outcome.status is Status.UNAVAILABLE else outcome.status
                store.promotions.loaded(outcome.request.token, status, outcome.checksums)
            elif isinstance(outcome, Dropped):
                logger.info(
                    "objects left the remote", extra={"objects": len(outcome.keys), "why": outcome.reason}
                )
                if self._placements is not None:
                    self._placements.removed(outcome.keys, Tier.REMOTE)
                self.quotas.forget(outcome.keys)
                store.space.no_longer_cold(outcome.keys)
            else:
                self._count_found(outcome)

    def _count_written(self, store: Store, key: bytes) -> None:
        if self._placements is not None:
            self._placements.stored((key,), Tier.REMOTE)
        place = self._tier.place(key)
        # Only now, and not when it is accepted: a write that fails must push nothing out.
        if place is not None and (leaving := self.quotas.add(key, place.size_bytes)):
            self.remove(leaving)
            store.space.no_longer_cold(leaving)

    def _count_found(self, keys: Sequence[bytes]) -> None:
        """Of other stores, or from before."""
        if self._placements is not None:
            self._placements.stored(keys, Tier.REMOTE)
        for key in keys:
            if (place := self._tier.place(key)) is not None:
                self.quotas.note(key, place.size_bytes)

    def stats(self) -> dict[str, float]:
        return {REMOTE_PREFIX + name: value for name, value in self._tier.stats().items()}

    def check(self) -> RemoteCheck:
        """Of all that is known to be there now, to be run."""
        return self._tier.check()

    @property
    def trouble(self) -> str:
        """Why it cannot be said what is there; "" when it can."""
        return self._tier.trouble

    @property
    def is_available(self) -> bool:
        return self._tier.is_available

    @property
    def takes_writes(self) -> bool:
        """It is there, and has room in its queue."""
        return self._tier.takes_writes

    def has_room(self, key: bytes, size_bytes: int) -> bool:
        """Whether it could be written without anything leaving the remote for it, now or when what is on its
        way has come."""
        size_bytes += self._tier.in_flight_bytes
        return self._tier.has_room(size_bytes) and self.quotas.has_room(key, size_bytes)

    def write(
        self,
        key: bytes,
        num_layers: int,
        views: Sequence[memoryview],
        checksums: Sequence[int],
        token: StoredObject | Callable[[Written], None],
    ) -> Acceptance:
        """`views` must not change until the end of it is told: to the core for an object of the catalogue,
        else to the function; both by `poll`."""
        size_bytes = sum(map(len, views))
        if not self.quotas.fits(key, size_bytes):
            return Acceptance.REFUSED
        return self._tier.write(WriteRequest(key, views, size_bytes, num_layers, checksums, token))

    # ---- ColdTier --------------------------------------------------------------------------------------

    @property
    def delays_writers(self) -> bool:
        return False

    @property
    def metadata_bytes(self) -> int:
        return self._tier.metadata_bytes

    def __len__(self) -> int:
        return len(self._tier)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._tier)

    def find(self, key: bytes) -> ColdObject | None:
        self.quotas.touch(key)
        return self._tier.find(key)

    def has_copy(self, key: bytes) -> bool:
        return key in self._tier

    def tiers_of(self, key: bytes) -> bytes:
        return bytes([Tier.REMOTE]) if self._tier.find(key) else b""

    def write_back(self, obj: StoredObject) -> Acceptance:
        return self.write(obj.key, obj.num_layers, views_of(self._pool, obj), given_checksums(obj), obj)

    def copy(self, obj: StoredObject, on_written: Callable[[Written], None]) -> Acceptance:
        """Written as well as kept in DRAM; the caller counts as a user of the bytes until it is told the end
        of it, by `poll`."""
        return self.write(
            obj.key, obj.num_layers, views_of(self._pool, obj), given_checksums(obj), on_written
        )

    def load(self, obj: StoredObject) -> bool:
        return self._tier.read(ReadRequest(obj.key, views_of(self._pool, obj), obj))

    def note_removal(self, keys: Sequence[bytes]) -> None:
        self._tier.note_removal(keys)

    def remove(self, keys: Sequence[bytes]) -> None:
        if self._placements is not None:
            self._placements.removed([key for key in keys if key in self._tier], Tier.REMOTE)
        self.quotas.forget(keys)
        self._tier.remove(keys)
