"""Messages of operators and tools: pins, removal, listing, numbers, maintenance. Tags 40 to 59."""

import enum

import msgspec

from kvcore.wire.vocabulary import Message, PinKind


class Pin(Message, frozen=True, array_like=True, tag=40):
    keys: list[bytes]
    kind: int = PinKind.SOFT
    ttl_ms: int = 1_800_000


class Unpin(Message, frozen=True, array_like=True, tag=41):
    keys: list[bytes]


class Remove(Message, frozen=True, array_like=True, tag=42):
    """`force` also removes pinned objects; leased bytes stay untouched until their lease ends."""

    keys: list[bytes]
    force: bool = False


class EvictStrategy(enum.IntEnum):
    """What may go, always in the order of the store's eviction policy."""

    SAVE = 0  # anything; what no lower level has yet is saved there first
    COPIES = 1  # what a lower level has already: costs no disk or network, and loses nothing
    DISCARD = 2  # anything, and nothing is saved


class Evict(Message, frozen=True, array_like=True, tag=43):
    """Make at least `size_bytes` of DRAM free (0: evict everything evictable). Answered by EvictReply."""

    size_bytes: int = 0
    strategy: int = EvictStrategy.SAVE


class EvictReply(Message, frozen=True, array_like=True, tag=44):
    num_objects: int
    size_bytes: int


class ListKeys(Message, frozen=True, array_like=True, tag=45):
    """Pages through the catalogue; `cursor` 0 begins, the answer's `next_cursor` 0 ends."""

    cursor: int = 0
    limit: int = 1000


class KeyInfo(msgspec.Struct, frozen=True, array_like=True, gc=False):
    key: bytes
    size_bytes: int
    num_layers: int
    layers_ready: int
    tier: int
    pin: int
    num_leases: int
    copies: bytes = b""  # every tier that holds it whole, one byte each


class ListKeysReply(Message, frozen=True, array_like=True, tag=46):
    keys: list[KeyInfo]
    next_cursor: int


class Stats(Message, frozen=True, array_like=True, tag=47):
    pass


class StatsReply(Message, frozen=True, array_like=True, tag=48):
    """Flat numbers by name; names are those of the metrics without prefix (kvcore/metrics.py)."""

    values: dict[str, float]


class Drain(Message, frozen=True, array_like=True, tag=49):
    """Take no new objects (writers see FULL) and save what is in DRAM only. Answered at once, by DrainReply:
    ask again to see how far it is. `stop`: end the process when it is done."""

    stop: bool = False


class DrainReply(Message, frozen=True, array_like=True, tag=50):
    """`num_unsaved` objects of `unsaved_bytes` are in DRAM only; `num_pending` are still being written by
    their clients; of those done, `num_refused` could not be saved (all, for a store without SSD)."""

    is_done: bool
    num_unsaved: int
    unsaved_bytes: int
    num_pending: int
    num_refused: int


REMOTE_CHECK_BYTES_PER_S = 100 << 20


class Verify(Message, frozen=True, array_like=True, tag=51):
    """Check the bytes of every object, on all levels, against its checksums; what is corrupt is dropped.
    Answered at once, by VerifyReply. `start` False only asks how far it is. `remote_bytes_per_s` bounds how
    fast the remote is read, of which others may want something too; 0 leaves it out."""

    start: bool = False
    remote_bytes_per_s: int = REMOTE_CHECK_BYTES_PER_S


class CheckedLevel(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`num_done` includes those that turned out corrupt and those that could not be read."""

    tier: int
    num_objects: int
    num_done: int = 0
    num_corrupt: int = 0
    num_unread: int = 0


class VerifyReply(Message, frozen=True, array_like=True, tag=52):
    """`num_unchecked` of those done had no checksums from their writer. `trouble`: why a level could not be
    checked, or not to its end, for people; "" when there was none. An object counts on each level that holds
    it."""

    is_running: bool
    levels: list[CheckedLevel]
    num_unchecked: int
    trouble: str = ""

    @property
    def num_objects(self) -> int:
        return sum(level.num_objects for level in self.levels)

    @property
    def num_done(self) -> int:
        return sum(level.num_done for level in self.levels)

    @property
    def num_corrupt(self) -> int:
        return sum(level.num_corrupt for level in self.levels)


class Describe(Message, frozen=True, array_like=True, tag=53):
    """What is known of each key. Takes no lease, and counts as no use of the object."""

    keys: list[bytes]


class DescribeReply(Message, frozen=True, array_like=True, tag=54):
    """infos[i] is that of keys[i]; its tier is NONE when there is no such object."""

    infos: list[KeyInfo]


class ChangeReplica(Message, frozen=True, array_like=True, tag=55):
    """Whether `tier` shall hold a copy of these objects. Answered by StatusReply, at once or within
    `wait_ms`.

    Wanted: OK it has, PENDING it will have (also after the answer), MISSING there is no such object, FULL it
    has no room for it. Unwanted: OK it has not, INVALID it is the only copy (that is what Remove is for),
    LEASED somebody reads or has pinned it, MISSING. INVALID as well when the store has no such tier."""

    keys: list[bytes]
    tier: int
    is_wanted: bool = True
    wait_ms: int = 0


class Resolve(Message, frozen=True, array_like=True, tag=56):
    """The keys of blocks known by the names they have in the store's KV events. Answered by ResolveReply;
    a store that publishes no events knows none."""

    block_hashes: list[int]


class ResolveReply(Message, frozen=True, array_like=True, tag=57):
    """Of blocks that are there, in the order they were asked for; the others are left out. All keys of a
    name: each rank of an engine has its part of a block."""

    keys: list[bytes]
