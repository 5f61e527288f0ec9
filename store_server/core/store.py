"""The store without bytes, sockets or clock: what the server runs and a simulator can run as well.

Each call gets the time as `now` (seconds, never going back). Calls that end waiting leave tickets in
`waiters.finished`, to be answered with `reads.finish`. `agenda.earliest` says when `expire` must be called.
"""

from collections.abc import Sequence
from itertools import count

import msgspec

from kvcore import metrics
from kvcore.wire.messages import Stats, StatsReply
from store_server.core.allocator import SlabAllocator
from store_server.core.catalog import Catalog
from store_server.core.deadlines import Agenda
from store_server.core.eviction import POLICIES
from store_server.core.layers import Waiters
from store_server.core.leases import Leases
from store_server.core.objects import Session
from store_server.core.owners import Owners, Quota
from store_server.core.placements import PlacementLog
from store_server.core.promotion import Promotions
from store_server.core.reads import Reads
from store_server.core.room import RoomQueue
from store_server.core.space import Space
from store_server.core.tiering import ColdTier, NoColdTier
from store_server.core.upkeep import Upkeep
from store_server.core.writes import Writes

COUNTERS = (
    metrics.LOOKUP_KEYS_TOTAL,
    metrics.LOOKUP_HITS_TOTAL,
    metrics.READ_BYTES_TOTAL,
    metrics.WRITTEN_BYTES_TOTAL,
    metrics.LAYERS_COMMITTED_TOTAL,
    metrics.LAYERS_READ_BEFORE_SEAL_TOTAL,
    metrics.OBJECTS_SEALED_TOTAL,
    metrics.OBJECTS_ABANDONED_TOTAL,
    metrics.EVICTED_OBJECTS_TOTAL,
    metrics.EVICTED_BYTES_TOTAL,
    metrics.PROMOTED_OBJECTS_TOTAL,
    metrics.PROMOTED_BYTES_TOTAL,
    metrics.RESERVE_FULL_TOTAL,
    metrics.CORRUPT_TOTAL,
    metrics.LEASES_EXPIRED_TOTAL,
    metrics.PROTOCOL_ERRORS_TOTAL,
)


class StoreLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Policy of one store. Watermarks are shares of the pool, bookkeeping included."""

    pool_size_bytes: int
    slab_bytes: int | None = None
    eviction_policy: str = "lru"
    high_watermark: float = 0.95
    low_watermark: float = 0.90
    reservation_timeout_ms: int = 30_000
    default_lease_ms: int = 10_000
    max_lease_ms: int = 600_000
    max_payload_bytes: int = 1 << 30
    max_waiting_keys: int = 65_536  # of the parked requests of one session
    room_timeout_ms: int = 4_000  # a writer waits so long for room that write-back to disk is making
    promotion_timeout_ms: int = 4_000  # a reader that gave no wait_ms waits so long for what is on disk


class Store:
    """Facade: `writes`, `reads` and `upkeep` carry out requests, `space` is told when bytes are no longer
    used by a transport. Not thread-safe: one loop, one store.

    `cold` is the tier below DRAM; what it reports goes to `space.written`,
    `space.no_longer_cold` and `promotions.loaded`. What comes to DRAM and leaves it is told to
    `placements`. `quotas`: one for each tenant."""

    def __init__(
        self,
        limits: StoreLimits,
        cold: ColdTier | None = None,
        placements: PlacementLog | None = None,
        quotas: Sequence[Quota] = (),
    ) -> None:
        cold = NoColdTier() if cold is None else cold
        self.limits = limits
        self.agenda = Agenda()
        self.counters: dict[str, float] = dict.fromkeys(COUNTERS, 0)
        new_policy = POLICIES[limits.eviction_policy]
        self.catalog = Catalog(new_policy().bytes_per_object)
        self.waiters = Waiters(self.agenda)
        self.owners = Owners(quotas, limits.pool_size_bytes) if quotas else None
        self.space = Space(
            SlabAllocator(limits.pool_size_bytes, limits.slab_bytes),
            self.catalog,
            new_policy,
            self.agenda,
            self.counters,
            limits.high_watermark,
            limits.low_watermark,
            cold,
            placements,
            self.owners,
        )
        self.leases = Leases(self.agenda, self.space.release)
        self.writes = Writes(
            self.catalog,
            self.space,
            self.waiters,
            self.agenda,
            self.counters,
            limits.reservation_timeout_ms / 1e3,
            cold,
        )
        self.room = RoomQueue(self.agenda, limits.room_timeout_ms / 1e3)
        self.promotions = Promotions(cold, self.catalog, self.space, self.waiters, self.counters)
        self.reads = Reads(
            self.catalog,
            self.space,
            self.waiters,
            self.leases,
            self.counters,
            limits.default_lease_ms,
            limits.max_lease_ms,
            limits.max_payload_bytes,
            cold,
            self.promotions,
            limits.promotion_timeout_ms / 1e3,
            limits.max_waiting_keys,
        )
        self.upkeep = Upkeep(self.catalog, self.space, self.writes, self.promotions, cold)
        self._session_numbers = count(1)

    def open_session(self, client_name: str = "") -> Session:
        return Session(next(self._session_numbers), client_name)

    def close_session(self, session: Session) -> None:
        """The connection is gone: its reservations are abandoned, its leases end, its waits are forgotten.

        If it had direct access to the pool, call `writes.access_ended` when that is provably gone as well."""
        self.space.release(self.waiters.close_session(session))
        self.room.close_session(session)
        self.writes.close_session(session)
        self.leases.close_session(session)

    def expire(self, now: float) -> None:
        """Ends everything whose time has come."""
        self.writes.expire(now)
        self.counters[metrics.LEASES_EXPIRED_TOTAL] += self.leases.expire(now)
        self.waiters.expire(now)
        self.space.expire_pins(now)
        self.room.expire(now)
        self.agenda.earliest = min(
            self.writes.next_deadline(),
            self.leases.next_deadline(),
            self.waiters.next_deadline(),
            self.space.next_deadline(),
            self.room.next_deadline(),
        )

    def retry_for_room(self) -> None:
        """Call it when something was written back or given up: whoever waits for room may find it now."""
        self.room.retry()
        self.promotions.retry()

    def stats(self) -> dict[str, float]:
        """All gauges and counters of the core by name (kvcore/metrics.py)."""
        allocator = self.space.allocator
        return {
            metrics.POOL_SIZE_BYTES: allocator.size_bytes,
            metrics.POOL_USED_BYTES: allocator.used_bytes,
            metrics.METADATA_BYTES: self.catalog.metadata_bytes,
            metrics.OBJECTS: len(self.catalog.by_key) - self.writes.num_pending,
            metrics.OBJECTS_PENDING: self.writes.num_pending,
            metrics.LEASES: len(self.leases),
            metrics.QUARANTINED_BYTES: self.writes.quarantined_bytes,
            metrics.WAITERS: len(self.waiters),
            metrics.WAITING_FOR_ROOM: len(self.room),
            metrics.PROMOTIONS: len(self.promotions),
            **self.space.fragmentation(),
            **self.counters,
        }

    def stats_reply(self, request: Stats, shell_values: dict[str, float]) -> StatsReply:
        """`shell_values`: what only the shell knows (connections, say)."""
        return StatsReply(request.id, {**self.stats(), **shell_values})
