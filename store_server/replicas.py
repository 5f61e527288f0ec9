"""Copies of an object on its levels, as clients ask for them: DRAM, SSD and remote.

A wish is carried out step by step, each time something below DRAM has happened: an object that lies on a
remote only comes to DRAM first, and is written to the SSD from there.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from itertools import islice

from kvcore.errors import RequestRefused
from kvcore.wire.messages import ChangeReplica, ErrorCode, Reply, Status, StatusReply, Tier
from store_server.cold_levels import ColdLevels
from store_server.core.objects import StoredObject
from store_server.core.store import Store
from store_server.core.tiering import Acceptance
from store_server.pending_reply import PendingReply
from store_server.ssd import Written

_STEPS_AT_ONCE = 256

Wish = tuple[bytes, Tier]


class ReplicaKeeper:
    """Used in the store's loop. `proceed` must be called whenever something has happened below DRAM.
    `max_wishes` bounds what is remembered."""

    def __init__(self, store: Store, cold: ColdLevels | None, max_wishes: int) -> None:
        self._store = store
        self._cold = cold
        self._max_wishes = max_wishes
        self._wishes: OrderedDict[Wish, list[tuple[PendingReply, int]]] = OrderedDict()
        self._copying: set[Wish] = set()

    def change(self, request: ChangeReplica, answer: Callable[[Reply], None]) -> StatusReply | None:
        """None when the answer comes later, by `answer`."""
        try:
            tier = Tier(request.tier)
        except ValueError:
            raise RequestRefused(ErrorCode.BAD_REQUEST, f"no such tier: {request.tier}") from None
        if not request.is_wanted:
            return StatusReply(request.id, bytes(self._drop(key, tier) for key in request.keys))
        if len(self._wishes) + len(request.keys) > self._max_wishes:
            raise RequestRefused(
                ErrorCode.OVER_LIMIT, f"{len(self._wishes)} copies are being made already", True
            )
        job = PendingReply(request.id, len(request.keys), answer)
        for index, key in enumerate(request.keys):
            status = self._step(key, tier)
            job.statuses[index] = Status.PENDING if status is None else status
            if status is None:
                job.num_open += 1
                waiting = self._wishes.setdefault((key, tier), [])
                if request.wait_ms > 0:
                    waiting.append((job, index))
        if not job.num_open or request.wait_ms <= 0:
            return job.reply()
        loop = asyncio.get_running_loop()
        job.timer = loop.call_later(request.wait_ms / 1e3, self._give_up, job, request.keys, tier)
        return None

    def proceed(self) -> None:
        for key, tier in list(islice(self._wishes, _STEPS_AT_ONCE)):
            status = self._step(key, tier)
            if status is not None:
                self._fulfil((key, tier), status)
            else:
                self._wishes.move_to_end((key, tier))  # others are not held up by one that waits for room

    # ---- inside ----------------------------------------------------------------------------------------

    def _step(self, key: bytes, tier: Tier) -> Status | None:
        """Does what can be done now. None: it will take longer."""
        store, cold = self._store, self._cold
        obj = store.catalog.by_key.get(key)
        is_whole = obj is not None and obj.is_sealed
        if tier is Tier.DRAM:
            if is_whole:
                return Status.OK
        else:
            level = cold.level(tier) if cold is not None else None
            if level is None:
                return Status.INVALID
            if level.has_copy(key):
                return Status.OK
            if (key, tier) in self._copying:
                return None
            if obj is not None and is_whole:
                return self._copy(obj, tier)
        if store.promotions.want(key):
            return None
        if obj is not None:
            return Status.PENDING  # its writer is not done
        return Status.FULL if cold is not None and cold.find(key) else Status.MISSING

    def _copy(self, obj: StoredObject, tier: Tier) -> Status | None:
        level = self._cold.level(tier) if self._cold is not None else None
        assert level is not None
        acceptance = level.copy(obj, partial(self._copied, obj, tier))
        if acceptance is Acceptance.REFUSED:
            return Status.FULL
        if acceptance is Acceptance.QUEUED:
            obj.users += 1
            self._copying.add((obj.key, tier))
        return None

    def _copied(self, obj: StoredObject, tier: Tier, outcome: Written) -> None:
        wish = (obj.key, tier)
        self._copying.discard(wish)
        self._store.space.release((obj,))
        if outcome.status is not Status.OK:
            is_gone = outcome.status is Status.ABANDONED
            self._fulfil(wish, Status.MISSING if is_gone else Status.FULL)

    def _fulfil(self, wish: Wish, status: Status) -> None:
        for job, index in self._wishes.pop(wish, ()):
            job.close(index, status)

    def _give_up(self, job: PendingReply, keys: list[bytes], tier: Tier) -> None:
        """Waiting, not making the copies."""
        for index, key in enumerate(keys):
            waiting = self._wishes.get((key, tier))
            if waiting is not None and (job, index) in waiting:
                waiting.remove((job, index))
        job.timer = None
        job.finish()

    def _drop(self, key: bytes, tier: Tier) -> Status:
        store, cold = self._store, self._cold
        obj = store.catalog.by_key.get(key)
        is_whole = obj is not None and obj.is_sealed
        copies = set(cold.tiers_of(key)) if cold is not None else set()
        if is_whole:
            copies.add(Tier.DRAM)
        if not copies:
            return Status.MISSING if obj is None else Status.PENDING
        if tier not in copies:
            return Status.OK
        if len(copies) == 1:
            return Status.INVALID
        if tier is Tier.DRAM:
            assert obj is not None
            if obj.pin or obj.leases:
                return Status.LEASED
            store.space.discard(obj, evicted=True)
            return Status.OK
        level = cold.level(tier) if cold is not None else None
        assert level is not None
        level.remove([key])
        store.space.no_longer_cold([key])
        return Status.OK
