"""FakeStoreClient: a LayerwiseStore in memory, for tests of engine plugins.

store = FakeStore()
prefill, decode = FakeStoreClient(store), FakeStoreClient(store)
store.stop()            # both see UNAVAILABLE at once, as with a killed store
"""

import time
from collections.abc import Sequence
from typing import Any

from kvcore.client.base import UNAVAILABLE_LOOKUP, LookupResult
from kvcore.transport.base import Buffer, ReadBatch, Region, WriteBatch
from kvcore.transport.fake import DEFAULT_TIMEOUT_MS, FakeStore, FakeTransfer, FakeTransport
from kvcore.wire.messages import KeyInfo, Status, Tier

__all__ = ["FakeStore", "FakeStoreClient"]


class FakeStoreClient:
    """One client (one connection) of a FakeStore. `calls` records (method, keys) in order, `parents` what
    `reserve` was told about each key."""

    def __init__(self, store: FakeStore | None = None, *, timeout_ms: float = DEFAULT_TIMEOUT_MS) -> None:
        self.store = store or FakeStore()
        self.calls: list[tuple[str, list[bytes]]] = []
        self.parents: dict[bytes, bytes] = {}
        self._transport = FakeTransport(self.store, timeout_ms=timeout_ms)

    @property
    def connected(self) -> bool:
        return self.store.up and not self._transport.closed

    def register(self, buffer: Buffer) -> Region:
        return self._transport.register(buffer)

    def lookup(
        self, keys: Sequence[bytes], *, include_pending: bool = False, timeout_ms: float | None = None
    ) -> LookupResult:
        self.calls.append(("lookup", list(keys)))
        if not self._answers(timeout_ms):
            return UNAVAILABLE_LOOKUP
        with self.store.changed:
            ready: list[int] = []
            for key in keys:
                item = self.store.objects.get(key)
                if item is None or not (item.sealed or include_pending):
                    break
                ready.append(item.layers_ready)
        return LookupResult(num_hits=len(ready), layers_ready=ready, tiers=[Tier.DRAM] * len(ready), load=0.0)

    def batch_exists(self, keys: Sequence[bytes], *, timeout_ms: float | None = None) -> list[bool]:
        self.calls.append(("exists", list(keys)))
        if not self._answers(timeout_ms):
            return [False] * len(keys)
        with self.store.changed:
            found = (self.store.objects.get(key) for key in keys)
            return [item is not None and item.sealed for item in found]

    def list_keys(self, cursor: int = 0, limit: int = 1000) -> tuple[list[KeyInfo], int]:
        if not self._answers(None):
            return [], 0
        with self.store.changed:
            items = list(self.store.objects.items())
        infos = [
            KeyInfo(key, len(item.data), item.num_layers, item.layers_ready, Tier.DRAM, 0, 0)
            for key, item in items[cursor : cursor + limit]
        ]
        return infos, cursor + limit if cursor + limit < len(items) else 0

    def batch_remove(self, keys: Sequence[bytes], *, force: bool = False) -> list[Status]:
        self.calls.append(("remove", list(keys)))
        if not self._answers(None):
            return [Status.UNAVAILABLE] * len(keys)
        with self.store.changed:
            found = [self.store.objects.pop(key, None) for key in keys]
        return [Status.OK if item is not None else Status.MISSING for item in found]

    def reserve(
        self,
        keys: Sequence[bytes],
        size_bytes: int,
        num_layers: int = 1,
        *,
        parents: Sequence[bytes] = (),
        timeout_ms: float | None = None,
    ) -> list[Status]:
        self.calls.append(("reserve", list(keys)))
        self.parents.update(zip(keys, parents, strict=True) if parents else ())
        if not self._answers(timeout_ms):
            return [Status.UNAVAILABLE] * len(keys)
        with self.store.changed:
            owner = self._transport.owner
            return [self.store.reserve(owner, key, size_bytes, num_layers) for key in keys]

    def write_layers(
        self, keys: Sequence[bytes], layer_begin: int, layer_end: int, buffers: Sequence[Any]
    ) -> FakeTransfer:
        self.calls.append(("write_layers", list(keys)))
        batch = WriteBatch(keys=keys, buffers=buffers, layer_begin=layer_begin, layer_end=layer_end)
        return self._transport.submit(batch)

    def read_layers(
        self,
        keys: Sequence[bytes],
        layer_begin: int,
        layer_end: int,
        buffers: Sequence[Any],
        *,
        wait_ms: int = 0,
    ) -> FakeTransfer:
        self.calls.append(("read_layers", list(keys)))
        return self._transport.submit(
            ReadBatch(
                keys=keys, buffers=buffers, layer_begin=layer_begin, layer_end=layer_end, wait_ms=wait_ms
            )
        )

    def abort(self, keys: Sequence[bytes]) -> None:
        self.calls.append(("abort", list(keys)))
        with self.store.changed:
            if self.connected:
                self.store.abort(self._transport.owner, keys)

    def counters(self) -> dict[str, int | str]:
        return {"connected": int(self.connected), "plane": self._transport.name}

    def close(self) -> None:
        self._transport.close()

    def _answers(self, timeout_ms: float | None) -> bool:
        """Plays the store's delay; False when there is no answer in time."""
        timeout_ms = self._transport.timeout_ms if timeout_ms is None else timeout_ms
        if self.connected and self.store.delay_ms:
            time.sleep(min(self.store.delay_ms, timeout_ms) / 1e3)
        return self.connected and self.store.delay_ms <= timeout_ms
