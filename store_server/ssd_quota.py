"""How much of the SSD each tenant with a quota uses, and which of its objects go when that is too much."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from store_server.core.owners import PREFIX_BYTES, Quota


class SsdQuotas:
    """Keys of other owners are nobody's concern here: every method takes and ignores them."""

    def __init__(self, quotas: Sequence[Quota] = ()) -> None:
        self._limits = {quota.prefix: quota.ssd_bytes for quota in quotas if quota.ssd_bytes}
        self._sizes: dict[bytes, OrderedDict[bytes, int]] = {prefix: OrderedDict() for prefix in self._limits}
        self._used_bytes = dict.fromkeys(self._limits, 0)

    def used_bytes(self, prefix: bytes) -> int:
        """Of a tenant with a quota; 0 for others."""
        return self._used_bytes.get(prefix, 0)

    def fits(self, key: bytes, size_bytes: int) -> bool:
        """Whether it could ever be stored."""
        limit_bytes = self._limits.get(key[:PREFIX_BYTES])
        return limit_bytes is None or size_bytes <= limit_bytes

    def add(self, key: bytes, size_bytes: int) -> list[bytes]:
        """It is going to the SSD. Returns the owner's objects that have to leave for it, already
        forgotten here."""
        prefix = key[:PREFIX_BYTES]
        sizes = self._sizes.get(prefix)
        if sizes is None:
            return []
        self.forget([key])
        leaving = []
        while self._used_bytes[prefix] + size_bytes > self._limits[prefix]:
            oldest, freed_bytes = sizes.popitem(last=False)
            self._used_bytes[prefix] -= freed_bytes
            leaving.append(oldest)
        sizes[key] = size_bytes
        self._used_bytes[prefix] += size_bytes
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
