"""Bringing objects back from the cold tier because somebody wants to read them.

A promoted object lies in the catalogue like a reserved one, with no layer ready, until its bytes have come;
those who want it wait for it as they would for a writer.
"""

import struct
from collections import OrderedDict
from collections.abc import Sequence

from kvcore import metrics
from kvcore.wire.messages import Status
from store_server.core.catalog import Catalog
from store_server.core.layers import Waiters
from store_server.core.objects import StoredObject
from store_server.core.space import Space
from store_server.core.tiering import ColdTier


class Promotions:
    def __init__(
        self, cold: ColdTier, catalog: Catalog, space: Space, waiters: Waiters, counters: dict[str, float]
    ) -> None:
        self._cold = cold
        self._catalog = catalog
        self._space = space
        self._waiters = waiters
        self._counters = counters
        self._loading: dict[bytes, StoredObject] = {}
        # There was no room for these yet; in the order in which they were wanted.
        self._waiting: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._loading) + len(self._waiting)

    def is_loading(self, key: bytes) -> bool:
        return key in self._loading

    def want(self, key: bytes) -> bool:
        """Start to bring it back if it is in the cold tier only. True: it is on its way."""
        if key in self._loading or key in self._waiting:
            return True
        if key in self._catalog.by_key or self._cold.find(key) is None:
            return False
        return self._begin(key)

    def retry(self) -> None:
        """There may be room now."""
        for key in list(self._waiting):
            del self._waiting[key]
            if key in self._catalog.by_key:
                continue
            if not self._begin(key):
                is_cold = self._cold.find(key) is not None
                self._waiters.resolve(key, Status.FULL if is_cold else Status.MISSING)
            elif key in self._waiting:
                self._waiting.move_to_end(key, last=False)
                break

    def loaded(self, obj: StoredObject, status: Status, checksums: Sequence[int]) -> None:
        """The bytes of `obj` have come (OK), or will not."""
        if self._loading.get(obj.key) is obj:
            del self._loading[obj.key]
        if obj.gone:
            self._space.release((obj,))
        elif status is Status.OK:
            obj.layers_ready = obj.num_layers
            obj.checksums = struct.pack(f"<{len(checksums)}Q", *checksums)
            # Others that the same request waits for need room, too, and must not take that of this one.
            self._waiters.hold(obj)
            self._space.release((obj,))
            self._space.sealed((obj,))
            self._counters[metrics.PROMOTED_OBJECTS_TOTAL] += 1
            self._counters[metrics.PROMOTED_BYTES_TOTAL] += obj.size_bytes
            self._waiters.advance(obj.key, obj.num_layers, obj.num_layers)
        else:
            self._space.discard(obj)
            self._space.release((obj,))
            self._waiters.resolve(obj.key, status)

    def forget(self, key: bytes) -> None:
        """It was removed: what is still on its way is thrown away when it comes."""
        self._waiting.pop(key, None)
        obj = self._loading.pop(key, None)
        if obj is not None:
            self._space.discard(obj)
        self._waiters.resolve(key, Status.MISSING)

    def _begin(self, key: bytes) -> bool:
        place = self._cold.find(key)
        if place is None:
            return False
        obj = StoredObject(key, place.size_bytes, place.num_layers, ())
        status = self._space.allocate(obj)
        if status is Status.FULL and self._space.is_making_room:
            self._waiting[key] = None
            return True
        if status is not Status.OK:
            return False
        self._catalog.add(obj)
        obj.users += 1
        if not self._cold.load(obj):
            self._space.discard(obj)
            self._space.release((obj,))
            return False
        self._loading[key] = obj
        return True
