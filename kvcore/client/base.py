"""The faces of the client: `StoreClient` (sync, for engine threads), `AsyncStoreClient` (event loops).

Nothing here raises for a miss, a dead store or a late answer: those are Status values. What raises is misuse
(wrong types) and, at connect time only, a store that refuses us for good (bad token, version).
"""

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from kvcore.transport.base import Buffer, Region, Transfer
from kvcore.transport.pool_view import ObjectView
from kvcore.wire.messages import EvictStrategy, KeyInfo, LookupReply, PinKind, Status, Tier


class LookupResult(msgspec.Struct, frozen=True):
    """`num_hits` leading keys are in the store; layers_ready[i] of each are committed. `available` is False
    when the store could not be asked (then num_hits is 0)."""

    num_hits: int
    layers_ready: Sequence[int]
    tiers: Sequence[int]
    load: float
    available: bool = True


UNAVAILABLE_LOOKUP = LookupResult(num_hits=0, layers_ready=(), tiers=(), load=0.0, available=False)


def is_lookup_of(keys: Sequence[bytes], reply: LookupReply) -> bool:
    """Whether the answer can be one to these keys: an engine believes in as many hits as it is told."""
    return 0 <= reply.num_hits == len(reply.layers_ready) == len(reply.tiers) <= len(keys)


class LayerwiseStore(Protocol):
    """What an engine plugin needs; implemented by StoreClient and by kvcore.client.fake.FakeStoreClient.

    All methods are thread-safe, never raise for what the store or the network does, and take a deadline
    (`timeout_ms`, None = the client's default).
    """

    def lookup(
        self, keys: Sequence[bytes], *, include_pending: bool = False, timeout_ms: float | None = None
    ) -> LookupResult: ...

    def reserve(
        self,
        keys: Sequence[bytes],
        size_bytes: int,
        num_layers: int = 1,
        *,
        parents: Sequence[bytes] = (),
        timeout_ms: float | None = None,
    ) -> list[Status]:
        """Room for objects of one size. OK: this client is now the writer of that key. parents[i]: the key of
        the block before keys[i] in its prefix, b"" for a first block; for prefix-aware eviction."""
        ...

    def write_layers(
        self, keys: Sequence[bytes], layer_begin: int, layer_end: int, buffers: Sequence[Any]
    ) -> Transfer:
        """Write and commit layers of objects reserved by this client. buffers[i]: one buffer or a sequence of
        buffers, kept unchanged by the caller until the transfer is done. ABANDONED: this client is not, or no
        longer, the writer of that key; INVALID: wrong size, or not the next layers."""
        ...

    def read_layers(
        self,
        keys: Sequence[bytes],
        layer_begin: int,
        layer_end: int,
        buffers: Sequence[Any],
        *,
        wait_ms: int = 0,
    ) -> Transfer:
        """Read layers into buffers[i] (one writable buffer or a sequence of them). With wait_ms the read
        follows a writer, also one that has not reserved the key yet."""
        ...

    def register(self, buffer: Buffer) -> Region:
        """Memory that will be read into and written from often: over RDMA its bytes then move without a copy.
        Any time, also without a store; reconnecting keeps it. Close the region when no transfer uses the
        memory any more. On other planes, and for memory no device takes, it does nothing."""
        ...

    def abort(self, keys: Sequence[bytes]) -> None:
        """Give up reservations and tell whoever waits for these keys. Best effort, does not wait."""
        ...

    @property
    def connected(self) -> bool: ...

    def counters(self) -> dict[str, int | str]:
        """What happened so far, flat: counts, the plane in use and why. A snapshot; cheap."""
        ...

    def close(self) -> None:
        """Gives up reservations and ends what is in flight with UNAVAILABLE."""
        ...


class ObjectStore(Protocol):
    """The plain object API; names as users of Mooncake's store know them."""

    def put(self, key: str | bytes, value: Buffer) -> Status: ...
    def get(self, key: str | bytes) -> bytes | None: ...
    def get_view(self, key: str | bytes) -> ObjectView | None:
        """The value where the store keeps it, under a lease; close it soon. None for a miss."""
        ...

    def get_into(self, key: str | bytes, buffer: Buffer) -> int:
        """Bytes read, or -1 for a miss (also when the buffer is too small)."""
        ...

    def put_from(self, key: str | bytes, buffer: Buffer) -> Status: ...
    def batch_put_from(self, keys: Sequence[str | bytes], buffers: Sequence[Buffer]) -> list[Status]: ...
    def batch_get_into(self, keys: Sequence[str | bytes], buffers: Sequence[Buffer]) -> list[int]: ...
    def exists(self, key: str | bytes) -> bool: ...
    def batch_exists(self, keys: Sequence[str | bytes], *, timeout_ms: float | None = None) -> list[bool]: ...
    def batch_status(self, keys: Sequence[str | bytes]) -> list[Status]: ...
    def get_size(self, key: str | bytes) -> int:
        """Bytes of a whole object, or -1 for a miss."""
        ...

    def describe(self, keys: Sequence[str | bytes]) -> list[KeyInfo | None]: ...
    def prefetch(self, keys: Sequence[str | bytes], tier: Tier = Tier.DRAM) -> Transfer:
        """Starts to bring objects from slower tiers to DRAM, or to `tier`; `wait` gives one Status a key."""
        ...

    def change_replica(
        self,
        keys: Sequence[str | bytes],
        *,
        add: Tier | None = None,
        drop: Tier | None = None,
        wait_ms: int = 0,
    ) -> list[Status]:
        """Adds a copy on one tier, drops that on another."""
        ...

    def copy_from(
        self,
        keys: Sequence[str | bytes],
        source: str,
        *,
        parents: Sequence[bytes] = (),
        wait_ms: int = 0,
    ) -> list[Status]:
        """Has the store copy objects from the one at `source`."""
        ...

    def remove(self, key: str | bytes, *, force: bool = False) -> Status: ...
    def batch_remove(self, keys: Sequence[str | bytes], *, force: bool = False) -> list[Status]: ...
    def pin(self, key: str | bytes, kind: PinKind = PinKind.SOFT, *, ttl_ms: int = 1_800_000) -> Status: ...
    def batch_pin(
        self, keys: Sequence[str | bytes], kind: PinKind = PinKind.SOFT, *, ttl_ms: int = 1_800_000
    ) -> list[Status]: ...
    def unpin(self, key: str | bytes) -> Status: ...
    def batch_unpin(self, keys: Sequence[str | bytes]) -> list[Status]: ...
    def evict(self, size_bytes: int = 0, strategy: EvictStrategy = EvictStrategy.SAVE) -> tuple[int, int]: ...
    def list_keys(self, cursor: int = 0, limit: int = 1000) -> tuple[list[KeyInfo], int]: ...
    def stats(self) -> dict[str, float]: ...
