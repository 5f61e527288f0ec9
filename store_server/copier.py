"""Copies what has come to the SSD on to the remote, before the SSD gives it up for younger objects.

First in, first out is how the SSD makes room, so the oldest is copied first. The bytes come from DRAM as long
as they are there, else from the SSD. A remote that is slow or down only makes the queue longer.
"""

from collections import OrderedDict
from functools import partial

from kvcore import metrics
from kvcore.wire.messages import Status
from store_server.cold import SsdColdTier
from store_server.cold_remote import RemoteColdTier
from store_server.core.objects import StoredObject
from store_server.core.store import Store
from store_server.core.tiering import Acceptance
from store_server.ssd import Loaded, Written

_READ_AHEAD_BYTES = 16 << 20  # in memory of our own, from the SSD
_BYTES_PER_KEY = 120


class Copier:
    """Used in the store's loop."""

    def __init__(self, ssd: SsdColdTier, remote: RemoteColdTier) -> None:
        self._ssd = ssd
        self._remote = remote
        self._pending: OrderedDict[bytes, bool] = OrderedDict()  # whether it may push out what is older
        self._reading: set[bytes] = set()  # from the SSD; what is removed meanwhile is taken out
        self._reading_bytes = 0
        self._num_missed = 0

    def close(self) -> None:
        """Begins nothing any more."""
        self._pending.clear()

    @property
    def metadata_bytes(self) -> int:
        return _BYTES_PER_KEY * len(self._pending)

    def stats(self) -> dict[str, float]:
        return {
            metrics.REMOTE_COPIES_PENDING: len(self._pending),
            metrics.REMOTE_COPIES_MISSED_TOTAL: self._num_missed,
        }

    def add(self, key: bytes) -> None:
        """It has come to the SSD."""
        self._pending[key] = True

    def add_missing(self) -> None:
        """All that the SSD has and the remote has not, as far as is known and as far as it has room: what had
        to leave it for younger objects must not come back, and push those out, with each listing."""
        for key in self._ssd:
            if not self._remote.has_copy(key) and key not in self._reading:
                self._pending.setdefault(key, False)

    def forget(self, key: bytes) -> None:
        """It is removed everywhere."""
        self._pending.pop(key, None)
        self._reading.discard(key)

    def proceed(self, store: Store) -> None:
        """Begins as many copies as the remote takes now."""
        while self._pending and self._remote.takes_writes and self._reading_bytes < _READ_AHEAD_BYTES:
            key, may_push_out = self._pending.popitem(last=False)
            if self._remote.has_copy(key) or not (may_push_out or self._has_room(key)):
                continue
            obj = store.catalog.by_key.get(key)
            if obj is not None and obj.is_sealed:
                if not self._copy_from_dram(store, obj):
                    return
            elif not self._copy_from_ssd(key):
                self._num_missed += 1

    def _has_room(self, key: bytes) -> bool:
        place = self._ssd.place(key)
        return place is not None and self._remote.has_room(key, place.size_bytes + self._reading_bytes)

    def _copy_from_dram(self, store: Store, obj: StoredObject) -> bool:
        def copied(outcome: Written) -> None:
            store.space.release((obj,))
            self._retry_if_failed(outcome)

        acceptance = self._remote.copy(obj, copied)
        if acceptance is Acceptance.QUEUED:
            obj.users += 1
        return self._is_taken(acceptance, obj.key)

    def _copy_from_ssd(self, key: bytes) -> bool:
        place = self._ssd.place(key)
        if place is None:
            return False
        buffer = memoryview(bytearray(place.size_bytes))
        self._reading.add(key)
        self._reading_bytes += place.size_bytes
        return self._ssd.read(key, buffer, partial(self._have_read, place.num_layers, buffer))

    def _have_read(self, num_layers: int, buffer: memoryview, outcome: Loaded) -> None:
        self._reading_bytes -= len(buffer)
        key = outcome.request.key
        if key not in self._reading:
            return
        self._reading.discard(key)
        if outcome.status is Status.OK:
            checksums = outcome.checksums
            self._is_taken(
                self._remote.write(key, num_layers, [buffer], checksums, self._retry_if_failed), key
            )
        else:
            self._num_missed += 1

    def _retry_if_failed(self, outcome: Written) -> None:
        if outcome.status is Status.UNAVAILABLE:
            self._put_back(outcome.request.key)

    def _is_taken(self, acceptance: Acceptance, key: bytes) -> bool:
        """False when there is no sense in offering more now. What is refused by a remote that is there is too
        large for it."""
        if acceptance is Acceptance.BUSY or (
            acceptance is Acceptance.REFUSED and not self._remote.is_available
        ):
            self._put_back(key)
            return False
        return True

    def _put_back(self, key: bytes) -> None:
        self._pending[key] = True
        self._pending.move_to_end(key, last=False)
