"""What the store asks of an eviction policy.

A policy orders sealed objects and knows nothing else: no bytes, no leases, no pins, no clock. The store tells
it what happened and asks it for one victim at a time, because some policies (SIEVE, S3-FIFO) change their own
state while they look for one.
"""

from collections.abc import Callable, Iterable
from typing import Protocol


class Evictable(Protocol):
    """What a policy may read of an object; both stay the same as long as the policy holds it."""

    @property
    def key(self) -> bytes: ...

    @property
    def size_bytes(self) -> int: ...


class EvictionPolicy(Protocol):
    """One ordering of objects by how little they would be missed. The contract all policies share is
    tests/contracts/eviction_contract.py; each method costs O(1), amortised, except for what `victim` skips.
    """

    bytes_per_object: int
    """Memory that the policy takes for each object it holds, as near as it can be said in advance: it counts
    as part of the store's memory. tests/unit/store_server/test_policy_memory.py measures it."""

    def on_insert(self, entry: Evictable, parent: bytes | None = None) -> None:
        """A new object, not known yet under this key. `parent` is the key of the block before it in its
        prefix, where the writer told it. Keys of one batch arrive last one first: of objects that are never
        used again the first block of a prefix goes last."""
        ...

    def on_access(self, keys: Iterable[bytes]) -> None:
        """These objects were used, the most valuable one last. Unknown keys are ignored."""
        ...

    def on_remove(self, key: bytes, *, evicted: bool = False) -> None:
        """The object is gone; `evicted` when it was this policy's own victim (a ghost queue remembers only
        those). Unknown keys are ignored."""
        ...

    def victim(self, evictable: Callable[[Evictable], bool]) -> Evictable | None:
        """The next object to evict of those for which `evictable` answers True; None when there is none.

        The object stays known until `on_remove`: asked again without it, a policy may name it again.
        """
        ...

    def __contains__(self, key: bytes) -> bool: ...

    def __len__(self) -> int: ...
