"""Room in the pool: who holds which extents, what is evicted when there is none left, and when bytes may be
reused.

Bytes are reused only when nobody can touch them any more: an object that left the catalogue keeps its extents
until its last user (a transport, a lease, a write to disk, the quarantine of a vanished writer) is gone.
"""

from collections.abc import Callable, Iterable, Sequence

from kvcore import metrics
from kvcore.wire.messages import EvictStrategy, PinKind, Status, Tier
from store_server.core.allocator import SlabAllocator
from store_server.core.catalog import Catalog
from store_server.core.deadlines import Agenda, Deadlines
from store_server.core.eviction import Evictable, EvictionPolicy
from store_server.core.objects import StoredObject
from store_server.core.owners import Owners, PolicyByOwner
from store_server.core.placements import PlacementLog
from store_server.core.tiering import ColdTier, Fate, WriteBack

_MAX_SLABS_TRIED = 16
_MAX_DEPARTURES = 64  # of one attempt to make room: what follows has to wait for the disk anyway


class Space:
    """`high_watermark` and `low_watermark` are shares of the capacity; eviction in the background starts
    above the one and goes down to the other, so that a put seldom has to wait for it."""

    def __init__(
        self,
        allocator: SlabAllocator,
        catalog: Catalog,
        new_policy: Callable[[], EvictionPolicy],
        agenda: Agenda,
        counters: dict[str, float],
        high_watermark: float,
        low_watermark: float,
        cold: ColdTier,
        placements: PlacementLog | None = None,
        owners: Owners | None = None,
    ) -> None:
        self.allocator = allocator
        self.capacity_bytes = allocator.size_bytes
        self._catalog = catalog
        self._counters = counters
        self._high_bytes = int(high_watermark * self.capacity_bytes)
        self._low_bytes = int(low_watermark * self.capacity_bytes)
        self._owners = owners

        def new_order() -> EvictionPolicy:
            return new_policy() if owners is None else PolicyByOwner(new_policy, owners)

        self._policy = new_order()
        # Softly pinned objects have an order of their own, asked only when the other has no victim.
        self._soft_policy = new_order()
        self._soft_pins = Deadlines[bytes](agenda)
        self._cold = cold
        self.write_back = WriteBack(cold)
        self._placements = placements

    @property
    def committed_bytes(self) -> int:
        """Pool space and bookkeeping together: millions of tiny objects must not outgrow the memory that the
        pool was given."""
        return self.allocator.used_bytes + self._catalog.metadata_bytes + self._cold.metadata_bytes

    @property
    def is_above_high_watermark(self) -> bool:
        """Objects that have departed are still readable, but their bytes can be had at any time."""
        write_back = self.write_back
        departed_bytes = write_back.in_flight_bytes + write_back.ready_bytes
        return self.committed_bytes - departed_bytes > self._high_bytes

    @property
    def is_making_room(self) -> bool:
        """Something is being written back, so that what is FULL now may find room soon."""
        return self._cold.delays_writers and self.write_back.in_flight_bytes > 0

    # ---- taking and giving back ------------------------------------------------------------------------

    def allocate(self, obj: StoredObject) -> Status:
        """Gives `obj` its extents, evicting what has to go: OK, FULL, or TOO_LARGE even for an empty pool."""
        allocator, size_bytes = self.allocator, obj.size_bytes
        needed_bytes = self._cost_bytes(obj)
        if self._owners is not None:
            status = self._make_room_in_quota(self._owners, obj, needed_bytes)
            if status is not Status.OK:
                return status
        while True:
            if self.committed_bytes + needed_bytes <= self.capacity_bytes:
                extents = allocator.allocate(size_bytes, obj)
                if extents is not None:
                    obj.extents = extents
                    if self._owners is not None:
                        self._owners.take(obj.key, needed_bytes)
                    return Status.OK
            if needed_bytes > self.capacity_bytes or not allocator.fits_empty_pool(size_bytes):
                return Status.TOO_LARGE
            if not self._evict_for(size_bytes):
                return Status.FULL

    def release(self, objects: Iterable[StoredObject]) -> None:
        """One user less of each."""
        for obj in objects:
            obj.users -= 1
            if obj.gone and not obj.users:
                self._free(obj)

    def discard(self, obj: StoredObject, *, evicted: bool = False) -> None:
        """Takes the object out of the catalogue; its bytes are freed now or with its last user."""
        self._catalog.remove(obj)
        self.write_back.take_back(obj.key)
        if obj.pin == PinKind.SOFT:
            self._soft_pins.drop(obj.key)
            self._soft_policy.on_remove(obj.key, evicted=evicted)
        else:
            self._policy.on_remove(obj.key, evicted=evicted)
        obj.gone = True
        if self._placements is not None and obj.is_sealed:
            self._placements.removed((obj.key,), Tier.DRAM)
        if not obj.users:
            self._free(obj)

    def _cost_bytes(self, obj: StoredObject) -> int:
        return self.allocator.cost_bytes(obj.size_bytes) + self._catalog.bytes_of(obj)

    def _free(self, obj: StoredObject) -> None:
        self.allocator.free(obj.extents)
        if self._owners is not None:
            self._owners.give_back(obj.key, self._cost_bytes(obj))

    # ---- order of eviction -----------------------------------------------------------------------------

    def sealed(self, objects: Sequence[StoredObject]) -> None:
        """These are complete and may be evicted from now on. They come in the order of their prefix."""
        self._catalog.sealed(objects)
        for obj in reversed(objects):
            self._enter_policy(obj)
        if self._placements is not None and objects:
            self._placements.stored([obj.key for obj in objects], Tier.DRAM)

    def touch(self, keys: Sequence[bytes]) -> None:
        """A reader wanted these, in the order of their prefix: the leaf shall go before the root."""
        if len(self.write_back):
            self._take_back(reversed(keys))
        self._policy.on_access(reversed(keys))
        if len(self._soft_policy):
            self._soft_policy.on_access(reversed(keys))

    def pin(self, obj: StoredObject, kind: PinKind, until: float) -> None:
        self.unpin(obj)
        self._leave_policy(obj)
        obj.pin = kind
        if kind is PinKind.SOFT:
            self._soft_pins.set(obj.key, until)
        self._enter_policy(obj)

    def unpin(self, obj: StoredObject) -> None:
        if obj.pin:
            self._soft_pins.drop(obj.key)
            self._leave_policy(obj)
            obj.pin = 0
            self._enter_policy(obj)

    def expire_pins(self, now: float) -> None:
        for key in self._soft_pins.pop_due(now):
            self.unpin(self._catalog.by_key[key])

    def next_deadline(self) -> float:
        return self._soft_pins.next()

    # ---- evicting --------------------------------------------------------------------------------------

    def evict_some(
        self,
        max_objects: int,
        free_bytes: int | None = None,
        strategy: EvictStrategy = EvictStrategy.SAVE,
    ) -> tuple[int, int, bool]:
        """Evicts up to `max_objects` until `free_bytes` are free, or will be once they are written back.
        None: so many that the rest is down to the low watermark; those in the cold tier stay readable then.

        Returns (objects, bytes, whether nothing more can be done now)."""
        goal = self._low_bytes if free_bytes is None else max(self.capacity_bytes - free_bytes, 0)
        write_back = self.write_back
        num_objects = size_bytes = 0
        while True:
            spared_bytes = write_back.in_flight_bytes + (write_back.ready_bytes if free_bytes is None else 0)
            if self.committed_bytes - spared_bytes <= goal:
                return num_objects, size_bytes, True
            if num_objects == max_objects:
                return num_objects, size_bytes, False
            victim = self._pick(set(), with_ready=free_bytes is not None, strategy=strategy)
            fate = Fate.WAIT if victim is None else self._fate_of(victim, strategy)
            if victim is None or fate is Fate.WAIT:
                return num_objects, size_bytes, True
            num_objects += 1
            size_bytes += victim.size_bytes
            if fate is Fate.DEPARTED:
                self._leave_order(victim)
            elif fate is Fate.STORED and free_bytes is None:
                self._leave_order(victim)
                write_back.set_ready(victim)
            else:
                self._evict(victim)

    def evict_some_of(
        self,
        owner: bytes,
        max_objects: int,
        free_bytes: int,
        strategy: EvictStrategy = EvictStrategy.SAVE,
    ) -> tuple[int, int, bool]:
        """As `evict_some`, of one owner's objects, until `free_bytes` of its quota are free."""
        owners = self._owners
        assert owners is not None
        goal = max(owners.limit_bytes(owner) - free_bytes, 0)
        num_objects = size_bytes = 0
        while owners.used_bytes(owner) - self.write_back.in_flight_bytes_of(owner) > goal:
            if num_objects == max_objects:
                return num_objects, size_bytes, False
            victim = self._evict_one_of(owner, strategy)
            if victim is None:
                break
            num_objects += 1
            size_bytes += victim.size_bytes
        return num_objects, size_bytes, True

    def _make_room_in_quota(self, owners: Owners, obj: StoredObject, needed_bytes: int) -> Status:
        owner = owners.owner_of(obj.key)
        limit_bytes = owners.limit_bytes(owner)
        if needed_bytes > limit_bytes:
            return Status.TOO_LARGE
        while (excess_bytes := owners.used_bytes(owner) + needed_bytes - limit_bytes) > 0:
            # What is being written to disk will make room: the writer waits for it.
            is_coming = self.is_making_room and self.write_back.in_flight_bytes_of(owner) >= excess_bytes
            if is_coming or self._evict_one_of(owner, self._strategy_now) is None:
                return Status.FULL
        return Status.OK

    @property
    def _strategy_now(self) -> EvictStrategy:
        """For a put that needs bytes."""
        return EvictStrategy.SAVE if self._cold.delays_writers else EvictStrategy.DISCARD

    def _fate_of(self, obj: StoredObject, strategy: EvictStrategy) -> Fate:
        if strategy is EvictStrategy.SAVE:
            return self.write_back.decide(obj)
        return Fate.STORED if self._cold.has_copy(obj.key) else Fate.REFUSED

    def _evict_one_of(self, owner: bytes, strategy: EvictStrategy) -> StoredObject | None:
        """None: nothing of this owner can go now."""
        victim = self._pick(set(), owner=owner, strategy=strategy)
        fate = Fate.WAIT if victim is None else self._fate_of(victim, strategy)
        if victim is None or fate is Fate.WAIT:
            return None
        if fate is Fate.DEPARTED:
            self._leave_order(victim)
        else:
            self._evict(victim)
        return victim

    def dram_only(self) -> list[StoredObject]:
        """Sealed objects that nothing would be left of if the store stopped now."""
        return [
            obj for obj in self._catalog.by_key.values() if obj.is_sealed and not self._cold.find(obj.key)
        ]

    def save(self, obj: StoredObject) -> Fate:
        """Writes it back wherever it is in the order of eviction."""
        if obj.gone or obj.key in self.write_back:
            return Fate.STORED
        fate = self.write_back.decide(obj)
        if fate is Fate.DEPARTED:
            self._leave_order(obj)
        return fate

    def written(self, obj: StoredObject, status: Status) -> None:
        """The write of a departed object ended: its bytes are in the cold tier (OK), or that did not take
        it."""
        is_ours = self.write_back.ended(obj)
        self.release((obj,))
        if is_ours and status is Status.OK:
            self.write_back.set_ready(obj)
        elif is_ours:
            self._evict(obj)

    def no_longer_cold(self, keys: Iterable[bytes]) -> None:
        """The cold tier has lost these; what is left of them in DRAM is the only copy again."""
        self._take_back(keys)

    def _take_back(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            obj = self.write_back.take_back(key)
            if obj is not None:
                self._enter_policy(obj)

    def _leave_order(self, obj: StoredObject) -> None:
        (self._soft_policy if obj.pin else self._policy).on_remove(obj.key, evicted=True)

    def _evict_for(self, size_bytes: int) -> bool:
        """Evicts the least that brings room for such an object nearer: one object of the right class, or all
        that share a slab with the coldest one, so that the slab can change its class. False: no room now."""
        missing = self.allocator.missing(size_bytes)
        slabs_tried: set[int] = set()
        for _ in range(_MAX_DEPARTURES):
            victim = self._pick(slabs_tried)
            if victim is None or len(slabs_tried) == _MAX_SLABS_TRIED:
                return False
            if missing is None or self.allocator.holds(victim.extents, missing):
                leaving = {victim}
            else:
                leaving = set(self.allocator.neighbours(victim.extents))
                if not all(self._may_go_with(victim, other) for other in leaving):
                    slabs_tried.add(victim.extents[0] // self.allocator.slab_bytes)
                    continue
            fates = {obj: self._fate_of(obj, self._strategy_now) for obj in leaving}
            if Fate.DEPARTED not in fates.values() and Fate.WAIT not in fates.values():
                for obj in leaving:
                    self._evict(obj)
                return True
            for obj, fate in fates.items():
                if fate is Fate.DEPARTED:
                    self._leave_order(obj)
            if Fate.WAIT in fates.values():
                return False
        return False

    def _pick(
        self,
        slabs_tried: set[int],
        *,
        with_ready: bool = True,
        owner: bytes | None = None,
        strategy: EvictStrategy = EvictStrategy.SAVE,
    ) -> StoredObject | None:
        """The next victim outside these slabs: of those that have departed, then in the order of eviction.
        With `owner` one of its objects."""
        in_use: list[bytes] = []
        slab_bytes = self.allocator.slab_bytes

        def evictable(entry: Evictable) -> bool:
            assert isinstance(entry, StoredObject)
            if entry.users:
                in_use.append(entry.key)
                return False
            if owner is not None and not self._is_of(owner, entry.key):
                return False
            if strategy is EvictStrategy.COPIES and not self._cold.has_copy(entry.key):
                return False
            return not slabs_tried or entry.extents[0] // slab_bytes not in slabs_tried

        if with_ready and len(self.write_back) and (ready := self.write_back.first_ready(evictable)):
            return ready
        in_use.clear()
        for policy in (self._policy, self._soft_policy):
            if owner is None:
                victim = policy.victim(evictable)
            else:
                assert isinstance(policy, PolicyByOwner)
                victim = policy.victim_of(owner, evictable)
            if in_use:
                # Being read now is being used: without this each search would pass over them again.
                policy.on_access(in_use)
                in_use.clear()
            if victim is not None:
                assert isinstance(victim, StoredObject)
                return victim
        return None

    def _is_of(self, owner: bytes, key: bytes) -> bool:
        return self._owners is not None and self._owners.owner_of(key) == owner

    @staticmethod
    def _may_go_with(victim: StoredObject, other: StoredObject) -> bool:
        is_protected = other.users or other.pin == PinKind.HARD or (other.pin and not victim.pin)
        return other.is_sealed and not other.gone and not is_protected

    def _evict(self, obj: StoredObject) -> None:
        self._counters[metrics.EVICTED_OBJECTS_TOTAL] += 1
        self._counters[metrics.EVICTED_BYTES_TOTAL] += obj.size_bytes
        self.discard(obj, evicted=True)

    def _enter_policy(self, obj: StoredObject) -> None:
        if obj.is_sealed and obj.pin != PinKind.HARD:
            (self._soft_policy if obj.pin else self._policy).on_insert(obj, obj.parent or None)

    def _leave_policy(self, obj: StoredObject) -> None:
        self.write_back.take_back(obj.key)
        (self._soft_policy if obj.pin else self._policy).on_remove(obj.key)

    def fragmentation(self) -> dict[str, float]:
        """Bytes of the pool that hold nothing and yet are not free for every size."""
        return {
            metrics.POOL_STRANDED_BYTES: self.allocator.stranded_bytes(),
            metrics.POOL_WASTED_BYTES: self.allocator.used_bytes - self.allocator.requested_bytes,
            metrics.POOL_FREE_SLABS: self.allocator.num_free_slabs,
        }
