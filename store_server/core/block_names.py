"""From the names blocks have in KV events back to keys, for whoever knows a block by its events only."""

from collections.abc import Sequence

from kvcore.wire.messages import Tier


class BlockNames:
    """Knows what the events of the store said last. Two blocks with one name, of which there is a chance of
    one in 2**64 a pair, answer for each other: a name is good for fetching ahead, not for reading."""

    def __init__(self) -> None:
        self._key_of: dict[int, bytes] = {}
        self._tiers_of: dict[int, int] = {}  # a bit for each tier

    def __len__(self) -> int:
        return len(self._key_of)

    def stored(self, names: Sequence[int], keys: Sequence[bytes], tier: Tier) -> None:
        bit = 1 << tier
        for name, key in zip(names, keys, strict=True):
            self._key_of[name] = key
            self._tiers_of[name] = self._tiers_of.get(name, 0) | bit

    def removed(self, names: Sequence[int], tier: Tier) -> None:
        for name in names:
            tiers = self._tiers_of.get(name, 0) & ~(1 << tier)
            if tiers:
                self._tiers_of[name] = tiers
            else:
                self._tiers_of.pop(name, None)
                self._key_of.pop(name, None)

    def keys_of(self, names: Sequence[int], prefix: bytes = b"") -> list[bytes]:
        """Of those that are there and whose key begins so, in the order of their names, without `prefix`."""
        found = (self._key_of.get(name) for name in names)
        return [key[len(prefix) :] for key in found if key is not None and key.startswith(prefix)]
