"""The levels below DRAM as one: SSD, then remote. What the server holds and the core asks."""

import asyncio
from collections.abc import Callable, Iterator, Sequence

from kvcore.metrics import REMOTE_PREFIX, SSD_PREFIX
from kvcore.wire.messages import Tier
from store_server.cold import SsdColdTier
from store_server.cold_remote import RemoteColdTier
from store_server.copier import Copier
from store_server.core.objects import StoredObject
from store_server.core.owners import Quota
from store_server.core.placements import PlacementLog
from store_server.core.store import Store
from store_server.core.tiering import Acceptance, ColdObject
from store_server.remote import RemoteConfig
from store_server.ssd import SsdConfig


class ColdLevels:
    """A `ColdTier` with an SSD, a remote, or both. `notify` is called, also from threads, when `poll` has
    something to do; `on_pushed_out` gets what left the SSD for its tenant's quota. `open` and `close` are
    awaited, everything else is the loop's."""

    def __init__(
        self,
        ssd: SsdConfig | None,
        remote: RemoteConfig | None,
        notify: Callable[[], None],
        on_pushed_out: Callable[[Sequence[bytes]], None],
        placements: PlacementLog | None = None,
        quotas: Sequence[Quota] = (),
    ) -> None:
        self._notify = notify
        self.ssd = (
            SsdColdTier(ssd, notify, on_pushed_out, placements, quotas, self._on_ssd_written)
            if ssd is not None
            else None
        )
        self.remote = (
            RemoteColdTier(remote, notify, self._on_listed, placements, quotas)
            if remote is not None
            else None
        )
        self._copier = (
            Copier(self.ssd, self.remote) if self.ssd is not None and self.remote is not None else None
        )
        first = self.ssd if self.ssd is not None else self.remote
        assert first is not None, "a store without lower levels has no ColdLevels"
        self._first: SsdColdTier | RemoteColdTier = first

    async def open(self, pool: memoryview) -> None:
        """ConfigError when no SSD path can be used. A remote that cannot be reached is no error."""
        if self.ssd is not None:
            await asyncio.to_thread(self.ssd.open, pool)
        if self.remote is not None:
            directories = self.ssd.directories if self.ssd is not None else []
            await asyncio.to_thread(self.remote.read_notes, directories)
            self.remote.open(pool)

    async def close(self, grace_s: float) -> None:
        """What was accepted is written, to the remote within `grace_s`; then nothing touches the pool."""
        if self._copier is not None:
            self._copier.close()
        if self.remote is not None:
            await self.remote.close(grace_s)
        if self.ssd is not None:
            await asyncio.to_thread(self.ssd.close)

    def poll(self, store: Store) -> None:
        """Tells the core what has happened, and carries on."""
        if self.remote is not None:
            self.remote.poll(store)
        if self.ssd is not None:
            self.ssd.poll(store)
        if self._copier is not None:
            self._copier.proceed(store)

    def level(self, tier: Tier) -> SsdColdTier | RemoteColdTier | None:
        """None when this store has no such level."""
        return {Tier.SSD: self.ssd, Tier.REMOTE: self.remote}.get(tier)

    def stats(self) -> dict[str, float]:
        parts = (self.ssd, self.remote, self._copier)
        return {name: value for part in parts if part is not None for name, value in part.stats().items()}

    def stats_of(self, owner: bytes) -> dict[str, float]:
        """What a tenant uses of the levels for which it has a quota."""
        values: dict[str, float] = {}
        for level, prefix in ((self.ssd, SSD_PREFIX), (self.remote, REMOTE_PREFIX)):
            if level is not None and (use := level.quotas.use_of(owner)) is not None:
                values[f"{prefix}objects"] = use.num_objects
                values[f"{prefix}live_bytes"] = use.used_bytes
                values[f"{prefix}capacity_bytes"] = use.limit_bytes
        return values

    def holdings(self) -> Iterator[tuple[Tier, list[bytes]]]:
        """All keys of each level."""
        if self.ssd is not None:
            yield Tier.SSD, list(self.ssd)
        if self.remote is not None:
            yield Tier.REMOTE, list(self.remote)

    # ---- ColdTier --------------------------------------------------------------------------------------

    @property
    def delays_writers(self) -> bool:
        return self._first.delays_writers

    @property
    def metadata_bytes(self) -> int:
        parts = (self.ssd, self.remote, self._copier)
        return sum(part.metadata_bytes for part in parts if part is not None)

    def __len__(self) -> int:
        """An object on both levels counts twice: what matters is whether there is any."""
        return sum(len(level) for level in (self.ssd, self.remote) if level is not None)

    def __iter__(self) -> Iterator[bytes]:
        if self.ssd is not None:
            yield from self.ssd
        if self.remote is not None:
            yield from (key for key in self.remote if self.ssd is None or not self.ssd.has_copy(key))

    def find(self, key: bytes) -> ColdObject | None:
        place = self.ssd.find(key) if self.ssd is not None else None
        if place is None and self.remote is not None:
            place = self.remote.find(key)
        return place

    def has_copy(self, key: bytes) -> bool:
        return self._first.has_copy(key)

    def tiers_of(self, key: bytes) -> bytes:
        return b"".join(level.tiers_of(key) for level in (self.ssd, self.remote) if level is not None)

    def write_back(self, obj: StoredObject) -> Acceptance:
        """What no SSD takes (all have failed, or it is larger than they hold) goes to the remote at once."""
        acceptance = self._first.write_back(obj)
        if acceptance is Acceptance.REFUSED and self._copier is not None and self.remote is not None:
            return Acceptance.REFUSED if self.remote.has_copy(obj.key) else self.remote.write_back(obj)
        return acceptance

    def load(self, obj: StoredObject) -> bool:
        is_coming = self.ssd.load(obj) if self.ssd is not None else False
        return is_coming or (self.remote.load(obj) if self.remote is not None else False)

    def note_removal(self, keys: Sequence[bytes]) -> None:
        for level in (self.ssd, self.remote):
            if level is not None:
                level.note_removal(keys)

    def remove(self, keys: Sequence[bytes]) -> None:
        if self._copier is not None:
            for key in keys:
                self._copier.forget(key)
        for level in (self.ssd, self.remote):
            if level is not None:
                level.remove(keys)

    # ---- inside ----------------------------------------------------------------------------------------

    def _on_ssd_written(self, key: bytes) -> None:
        if self._copier is not None:
            self._copier.add(key)

    def _on_listed(self) -> None:
        if self._copier is not None:
            self._copier.add_missing()
            self._notify()
