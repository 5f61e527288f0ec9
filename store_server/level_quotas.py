"""How much of a level below DRAM each tenant with a quota uses, and which of its objects go when that is too
much."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from store_server.core.owners import PREFIX_BYTES


class QuotaUse(NamedTuple):
    num_objects: int
    used_bytes: int
    limit_bytes: int


class LevelQuotas:
    """`limits`: bytes by prefix, 0: no limit. Keys of other owners are nobody's concern here: every method
    takes and ignores them."""

    def __init__(self, limits: Mapping[bytes, int]) -> None:
        self._limits = {prefix: limit_bytes for prefix, limit_bytes in limits.items() if limit_bytes}
        self._sizes: dict[bytes, OrderedDict[bytes, int]] = {prefix: OrderedDict() for prefix in self._limits}
        self._used_bytes = dict.fromkeys(self._limits, 0)

    def use_of(self, prefix: bytes) -> QuotaUse | None:
        """None for one without a quota, of whom nothing is kept."""
        if prefix not in self._limits:
            return None
        return QuotaUse(len(self._sizes[prefix]), self._used_bytes[prefix], self._limits[prefix])

    def fits(self, key: bytes, size_bytes: int) -> bool:
        """Whether it could ever be stored."""
        limit_bytes = self._limits.get(key[:PREFIX_BYTES])
        return limit_bytes is None or size_bytes <= limit_bytes

    def has_room(self, key: bytes, size_bytes: int) -> bool:
        """Whether it could be stored without anything leaving."""
        prefix = key[:PREFIX_BYTES]
        limit_bytes = self._limits.get(prefix)
        return limit_bytes is None or self._used_bytes[prefix] + size_bytes <= limit_bytes

    def note(self, key: bytes, size_bytes: int) -> None:
        """It lies there already, whether or not that is too much."""
        prefix = key[:PREFIX_BYTES]
        sizes = self._sizes.get(prefix)
        if sizes is not None:
            self.forget([key])
            sizes[key] = size_bytes
            self._used_bytes[prefix] += size_bytes

    def add(self, key: bytes, size_bytes: int) -> list[bytes]:
        """It is going there. Returns the owner's objects that have to leave for it, already forgotten
        here."""
        self.note(key, size_bytes)
        prefix = key[:PREFIX_BYTES]
        leaving: list[bytes] = []
        if prefix not in self._limits:
            return leaving
        sizes = self._sizes[prefix]
        while self._used_bytes[prefix] > self._limits[prefix] and len(sizes) > 1:
            oldest, freed_bytes = sizes.popitem(last=False)
            self._used_bytes[prefix] -= freed_bytes
            leaving.append(oldest)
        return leaving

    def touch(self, key: bytes) -> None:
        """Somebody asks for it, so it leaves after those nobody asks for."""
        if self._limits:
            sizes = self._sizes.get(key[:PREFIX_BYTES])
            if sizes is not None and key in sizes:
                sizes.move_to_end(key)

    def forget(self, keys: Iterable[bytes]) -> None:
        """They are no longer there."""
        if not self._limits:
            return
        for key in keys:
            prefix = key[:PREFIX_BYTES]
            if prefix in self._sizes:
                self._used_bytes[prefix] -= self._sizes[prefix].pop(key, 0)
