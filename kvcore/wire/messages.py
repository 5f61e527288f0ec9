"""Messages of the store protocol, version 1 (docs/protocol.md tells it as a story).

Each is a msgspec Struct encoded as a msgpack array [tag, fields...]. Fields may be added at the end with a
default: older peers ignore what they do not know. Every request carries an `id` chosen by the client; its
answer carries the same one, and answers may come in any order. Messages are batches by nature: 128 keys are
one message. Payload bytes never pass through the codec: they follow the frame (see codec.py).

An object is a run of `size_bytes` bytes cut into `num_layers` equal layers; layer l is the bytes
[l * size / n, (l + 1) * size / n). Layers become readable in order, as they are committed.
Where a message names several keys and a layer range, payload bytes are key-major: for each key in order, the
contiguous bytes of its layers [layer_begin, layer_end).
"""

import msgspec

from kvcore.wire.copying import CopyFrom as CopyFrom
from kvcore.wire.direct import ConnectQueuePair as ConnectQueuePair
from kvcore.wire.direct import ConnectQueuePairReply as ConnectQueuePairReply
from kvcore.wire.direct import DisconnectQueuePair as DisconnectQueuePair
from kvcore.wire.direct import QueuePairAddress as QueuePairAddress
from kvcore.wire.direct import RdmaOffer as RdmaOffer
from kvcore.wire.direct import ShmOffer as ShmOffer
from kvcore.wire.managing import REMOTE_CHECK_BYTES_PER_S as REMOTE_CHECK_BYTES_PER_S
from kvcore.wire.managing import ChangeReplica as ChangeReplica
from kvcore.wire.managing import CheckedLevel as CheckedLevel
from kvcore.wire.managing import Describe as Describe
from kvcore.wire.managing import DescribeReply as DescribeReply
from kvcore.wire.managing import Drain as Drain
from kvcore.wire.managing import DrainReply as DrainReply
from kvcore.wire.managing import Evict as Evict
from kvcore.wire.managing import EvictReply as EvictReply
from kvcore.wire.managing import EvictStrategy as EvictStrategy
from kvcore.wire.managing import KeyInfo as KeyInfo
from kvcore.wire.managing import ListKeys as ListKeys
from kvcore.wire.managing import ListKeysReply as ListKeysReply
from kvcore.wire.managing import Pin as Pin
from kvcore.wire.managing import Remove as Remove
from kvcore.wire.managing import Resolve as Resolve
from kvcore.wire.managing import ResolveReply as ResolveReply
from kvcore.wire.managing import Stats as Stats
from kvcore.wire.managing import StatsReply as StatsReply
from kvcore.wire.managing import Unpin as Unpin
from kvcore.wire.managing import Verify as Verify
from kvcore.wire.managing import VerifyReply as VerifyReply
from kvcore.wire.vocabulary import PROTOCOL_VERSION as PROTOCOL_VERSION
from kvcore.wire.vocabulary import ErrorCode as ErrorCode
from kvcore.wire.vocabulary import Message as Message
from kvcore.wire.vocabulary import PinKind as PinKind
from kvcore.wire.vocabulary import Status as Status
from kvcore.wire.vocabulary import Tier as Tier

# ---- session -------------------------------------------------------------------------------------------


class Hello(Message, frozen=True, array_like=True, tag=1):
    """First message of a client. `planes`: those it can use, best first. `host_id`: equal on one host."""

    version: int
    client_name: str
    planes: list[str]
    token: str = ""
    host_id: str = ""


class HelloReply(Message, frozen=True, array_like=True, tag=2):
    """`server_id` changes when the store restarts. Limits are hard: a frame over them ends the connection."""

    version: int
    server_id: str
    planes: list[str]
    max_body_bytes: int
    max_payload_bytes: int
    max_keys: int
    default_lease_ms: int
    shm: ShmOffer | None = None
    rdma: RdmaOffer | None = None


class ErrorReply(Message, frozen=True, array_like=True, tag=3):
    code: int
    message: str
    retryable: bool = False


class Ack(Message, frozen=True, array_like=True, tag=4):
    pass


class StatusReply(Message, frozen=True, array_like=True, tag=5):
    """One Status a key, as bytes: statuses[i] is that of keys[i]. Answers Put, Write, Commit, Abort, Remove,
    Pin, Unpin, Prefetch."""

    statuses: bytes


# ---- asking --------------------------------------------------------------------------------------------


class Lookup(Message, frozen=True, array_like=True, tag=10):
    """How many leading keys are there? Takes no lease: looking must never starve writers.

    With `include_pending` a block whose layers are still arriving counts as a hit.
    """

    keys: list[bytes]
    include_pending: bool = False


class LookupReply(Message, frozen=True, array_like=True, tag=11):
    """`layers_ready[i]` and `tiers[i]` for each of the `num_hits` leading keys."""

    num_hits: int
    layers_ready: list[int]
    tiers: bytes
    load: float = 0.0  # 0 idle .. 1 saturated: a reader may prefer to recompute


class Exists(Message, frozen=True, array_like=True, tag=12):
    """Answered by StatusReply: OK, PENDING or MISSING for every key. Takes no lease."""

    keys: list[bytes]


# ---- writing -------------------------------------------------------------------------------------------


class Put(Message, frozen=True, array_like=True, tag=20):
    """Reserve, write and seal in one round trip; the payload is all values in order.

    `sizes_bytes` has one entry a key. `checksums` (xxh3-64 of each value) is empty when not computed, or when
    `sums_follow`: then they are the end of the payload, one u64 in little endian a key, so that a writer can
    compute them while it sends.
    """

    keys: list[bytes]
    sizes_bytes: list[int]
    checksums: list[int] = []
    sums_follow: bool = False


class Reserve(Message, frozen=True, array_like=True, tag=21):
    """Ask for room. The first writer of a key wins; a reservation belongs to its connection and dies with it.

    `sizes_bytes` has one entry a key, or a single one for all, each a multiple of `num_layers`. A reservation
    without a commit within the store's reservation timeout is abandoned. The bytes of layers come by Write
    (tcp), or through the granted extents followed by Commit (shm, rdma).

    A store with an SSD may answer later, when writing back has made room, and FULL only if that took too
    long. `parents[i]`: the key of the block before keys[i] in its prefix, b"" for a first block; empty when
    not known. Prefix-aware eviction goes by it.
    """

    keys: list[bytes]
    sizes_bytes: list[int]
    num_layers: int = 1
    parents: list[bytes] = []


class Grant(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where an object lives in the pool: `extents` = [offset, size, offset, size, ...], concatenated.

    Extents cover the whole object, also when only some layers were asked for; they are empty for a client
    that has neither attached the pool nor connected a queue pair. `checksums`: one a layer of the object (0:
    not given or not committed yet), or empty. `unchecked`: bytes came over a network since anybody compared
    them with those.
    """

    status: int
    extents: list[int] = []
    size_bytes: int = 0
    num_layers: int = 0
    layers_ready: int = 0
    checksums: list[int] = []
    unchecked: bool = False


class ReserveReply(Message, frozen=True, array_like=True, tag=22):
    """grants[i].status: OK | EXISTS | PENDING | FULL | TOO_LARGE."""

    grants: list[Grant]


class Write(Message, frozen=True, array_like=True, tag=23):
    """Bytes of layers [layer_begin, layer_end) of reserved objects as payload; commits them on arrival.

    Layers of one key must be committed in order, without gaps. Every key has the same share of the payload
    (payload bytes / number of keys), so that the bytes of a key that is no longer reserved can be skipped;
    a key whose layers have another size answers INVALID. `checksums`: key-major, one a (key, layer), or
    empty.
    """

    keys: list[bytes]
    layer_begin: int
    layer_end: int
    checksums: list[int] = []


class Commit(Message, frozen=True, array_like=True, tag=24):
    """Like Write without payload: the bytes are already in the granted extents. The last layer seals."""

    keys: list[bytes]
    layer_begin: int
    layer_end: int
    checksums: list[int] = []


class Abort(Message, frozen=True, array_like=True, tag=25):
    """Give up own reservations. Whoever waits for one of these keys, reserved or not, learns ABANDONED, and
    so does who begins to wait within 2 s after, unless somebody has reserved the key again."""

    keys: list[bytes]


# ---- reading -------------------------------------------------------------------------------------------


class Read(Message, frozen=True, array_like=True, tag=30):
    """Layers [layer_begin, layer_end) of each key as the answer's payload. layer_end 0 means all layers.

    With `wait_ms` > 0 the answer waits until those layers of every key are committed, also for keys nobody
    has reserved yet; a key that ends otherwise (ABANDONED, TIMED_OUT, MISSING) has no bytes in the payload.
    Objects on SSD come to DRAM first: the answer waits for them also without `wait_ms`, for as long as the
    store is set to wait for its disks.
    """

    keys: list[bytes]
    layer_begin: int = 0
    layer_end: int = 0
    wait_ms: int = 0


class ReadReply(Message, frozen=True, array_like=True, tag=31):
    """`sizes_bytes[i]` payload bytes belong to keys[i] (0 unless its status is OK).

    `checksums`: for each key whose status is OK, one for each of its layers in the payload, key-major (0: the
    writer gave none); empty when no writer gave any. `num_layers[i]`: how many layers of keys[i] are in the
    payload; given when the request left it open (layer_end 0), else empty.
    """

    statuses: bytes
    sizes_bytes: list[int]
    checksums: list[int] = []
    num_layers: list[int] = []


class Await(Message, frozen=True, array_like=True, tag=32):
    """Answer once `layer_end` layers (0: all) of each key are committed, or `wait_ms` passed: StatusReply.

    With `wait_ms` 0 it waits for no writer, but brings what is on SSD to DRAM: this is how to prefetch.
    """

    keys: list[bytes]
    layer_end: int
    wait_ms: int


class Acquire(Message, frozen=True, array_like=True, tag=33):
    """Extents for a direct read, protected by a lease that ends by Release, by time, or with the connection.

    Waits like Await when `wait_ms` > 0. Bytes copied after the lease ended must be thrown away.
    `layer_begin` tells the store which layers are going to be copied; it changes nothing but its counters.
    `release`: leases of this connection that end here, which saves a Release for each.
    """

    keys: list[bytes]
    lease_ms: int
    layer_end: int = 0
    wait_ms: int = 0
    layer_begin: int = 0
    release: list[int] = []


class AcquireReply(Message, frozen=True, array_like=True, tag=34):
    lease: int
    grants: list[Grant]


class Renew(Message, frozen=True, array_like=True, tag=35):
    """Ack, or ErrorReply(BAD_REQUEST) when the lease is already over."""

    lease: int
    lease_ms: int


class Release(Message, frozen=True, array_like=True, tag=36):
    lease: int


Request = (
    Hello
    | Lookup
    | Exists
    | Put
    | Reserve
    | Write
    | Commit
    | Abort
    | Read
    | Await
    | Acquire
    | Renew
    | Release
    | Pin
    | Unpin
    | Remove
    | Evict
    | ListKeys
    | Stats
    | Drain
    | Verify
    | Describe
    | ChangeReplica
    | Resolve
    | CopyFrom
    | ConnectQueuePair
    | DisconnectQueuePair
)
Reply = (
    HelloReply
    | ErrorReply
    | Ack
    | StatusReply
    | LookupReply
    | ReserveReply
    | ReadReply
    | AcquireReply
    | EvictReply
    | ListKeysReply
    | StatsReply
    | DrainReply
    | VerifyReply
    | DescribeReply
    | ResolveReply
    | ConnectQueuePairReply
)
