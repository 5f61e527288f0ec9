"""The things the store keeps account of: objects, reservations and the sessions they belong to."""

import msgspec

from store_server.core.allocator import Extents

METADATA_BYTES_PER_OBJECT = 293
"""Estimate of all bookkeeping for one sealed object with a 32-byte key, its key included; what the eviction
policy takes comes on top (`EvictionPolicy.bytes_per_object`). tests/unit/store_server/test_metadata_bytes.py
holds it against what Python really takes."""

METADATA_BYTES_PER_LAYER = 8  # its checksum


class StoredObject(msgspec.Struct, gc=False, eq=False):
    """One object, reserved or sealed. `gc=False`: a million of them must not slow down every collection, and
    they take part in no cycle.

    `users` counts who may still touch the bytes: transports that send or receive them, leases, quarantine.
    An object that is `gone` has left the catalogue; its extents are free once nobody uses them.
    `parent` is the key of the block before it in its prefix, as far as its writer told it.
    `checksums` are packed little-endian u64, one a ready layer, or empty when the writer left one out.
    `unchecked`: bytes of it came over a network, and nobody has compared them with those sums.
    """

    key: bytes
    size_bytes: int
    num_layers: int
    extents: Extents
    layers_ready: int = 0
    checksums: bytes = b""
    users: int = 0
    leases: int = 0
    pin: int = 0
    gone: bool = False
    unchecked: bool = False
    parent: bytes = b""

    @property
    def is_sealed(self) -> bool:
        return self.layers_ready == self.num_layers


class Session(msgspec.Struct, eq=False):
    """One connection as the core sees it. The shell sets `is_mapped` as long as the client holds a mapping of
    the pool, and `num_queue_pairs` to how many it has connected; only with one of them are extents handed
    out, and only then must abandoned ones be quarantined. `num_waiting_keys` are those of its parked
    requests."""

    number: int
    client_name: str = ""
    is_mapped: bool = False
    num_queue_pairs: int = 0
    num_waiting_keys: int = 0
    lease_numbers: set[int] = msgspec.field(default_factory=set)
    quarantined: dict[bytes, list[StoredObject]] = msgspec.field(default_factory=dict)

    @property
    def has_direct_access(self) -> bool:
        """Whether the client can touch the pool's memory by itself."""
        return self.is_mapped or self.num_queue_pairs > 0


class Reservation(msgspec.Struct, eq=False):
    """Who writes an object, and until when the next commit has to come. `is_direct`: the writer was told the
    extents and writes to them by itself."""

    obj: StoredObject
    session: Session
    deadline: float
    is_direct: bool
