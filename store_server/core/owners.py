"""Tenants of one store: each sees only its own keys, and evicts within its own quota.

A tenant's objects lie under keys that begin with its prefix, which the server puts in front of whatever keys
the tenant names: there is no key by which it could reach another's. Keys without a known prefix are the
operator's.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec
import xxhash

from store_server.core.eviction import Evictable, EvictionPolicy

PREFIX_BYTES = 16
OPERATOR = b""


def tenant_prefix(name: str) -> bytes:
    """Stays the same for a name, so that blocks on SSD are found again."""
    return xxhash.xxh3_128_digest(b"tenant\0" + name.encode())


class Quota(msgspec.Struct, frozen=True, kw_only=True):
    """0: as much as there is."""

    prefix: bytes
    dram_bytes: int = 0
    ssd_bytes: int = 0
    remote_bytes: int = 0


class Owners:
    """Who holds how much of the pool, bookkeeping included."""

    def __init__(self, quotas: Sequence[Quota], pool_size_bytes: int) -> None:
        self.quotas = {quota.prefix: quota for quota in quotas}
        self._limits = {quota.prefix: quota.dram_bytes or pool_size_bytes for quota in quotas}
        self._limits[OPERATOR] = pool_size_bytes
        self._used_bytes = dict.fromkeys(self._limits, 0)
        self._num_objects = dict.fromkeys(self._limits, 0)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._limits)

    def owner_of(self, key: bytes) -> bytes:
        prefix = key[:PREFIX_BYTES]
        return prefix if prefix in self.quotas else OPERATOR

    def limit_bytes(self, owner: bytes) -> int:
        return self._limits[owner]

    def used_bytes(self, owner: bytes) -> int:
        return self._used_bytes[owner]

    def num_objects(self, owner: bytes) -> int:
        """Reserved ones included."""
        return self._num_objects[owner]

    def used_share(self, owner: bytes) -> float:
        return self._used_bytes[owner] / self._limits[owner]

    def take(self, key: bytes, size_bytes: int) -> None:
        owner = self.owner_of(key)
        self._used_bytes[owner] += size_bytes
        self._num_objects[owner] += 1

    def give_back(self, key: bytes, size_bytes: int) -> None:
        owner = self.owner_of(key)
        self._used_bytes[owner] -= size_bytes
        self._num_objects[owner] -= 1


class PolicyByOwner:
    """An EvictionPolicy with an order for each owner. When the pool itself is full, whoever uses the largest
    share of its quota gives first: a busy tenant cannot push out a modest one."""

    def __init__(self, new_policy: Callable[[], EvictionPolicy], owners: Owners) -> None:
        self._owners = owners
        self._policies = {owner: new_policy() for owner in owners}
        self.bytes_per_object = self._policies[OPERATOR].bytes_per_object

    def on_insert(self, entry: Evictable, parent: bytes | None = None) -> None:
        self._policies[self._owners.owner_of(entry.key)].on_insert(entry, parent)

    def on_access(self, keys: Iterable[bytes]) -> None:
        for owner, own_keys in itertools.groupby(keys, self._owners.owner_of):
            self._policies[owner].on_access(list(own_keys))

    def on_remove(self, key: bytes, *, evicted: bool = False) -> None:
        self._policies[self._owners.owner_of(key)].on_remove(key, evicted=evicted)

    def victim(self, evictable: Callable[[Evictable], bool]) -> Evictable | None:
        for owner in sorted(self._policies, key=self._owners.used_share, reverse=True):
            victim = self._policies[owner].victim(evictable)
            if victim is not None:
                return victim
        return None

    def victim_of(self, owner: bytes, evictable: Callable[[Evictable], bool]) -> Evictable | None:
        return self._policies[owner].victim(evictable)

    def __contains__(self, key: bytes) -> bool:
        return key in self._policies[self._owners.owner_of(key)]

    def __len__(self) -> int:
        return sum(map(len, self._policies.values()))
