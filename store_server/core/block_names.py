"""From the names blocks have in KV events back to keys, for whoever knows a block by its events only."""

from collections.abc import Sequence

from kvcore.wire.messages import Tier


class BlockNames:
    """Knows what the events of the store said last. Blocks with one name, such as the parts that the ranks of
    one engine have of it, all answer for it, and so does, with a chance of one in 2**64 a pair, a stranger: a
    name is good for fetching ahead, not for reading."""

    def __init__(self) -> None:
        self._keys_of: dict[int, bytes | tuple[bytes, ...]] = {}  # most names have one key
        self._tiers_of: dict[bytes, int] = {}  # a bit for each tier

    def __len__(self) -> int:
        return len(self._keys_of)

    def stored(self, names: Sequence[int], keys: Sequence[bytes], tier: Tier) -> None:
        """names[i] is a name of keys[i]; a key may have several."""
        bit = 1 << tier
        for name, key in zip(names, keys, strict=True):
            known = self._keys_of.get(name)
            if known is None:
                self._keys_of[name] = key
            elif key not in _as_tuple(known):
                self._keys_of[name] = (*_as_tuple(known), key)
            self._tiers_of[key] = self._tiers_of.get(key, 0) | bit

    def removed(self, names: Sequence[int], keys: Sequence[bytes], tier: Tier) -> None:
        """All names of these keys."""
        for key in keys:
            tiers = self._tiers_of.get(key, 0) & ~(1 << tier)
            if tiers:
                self._tiers_of[key] = tiers
            else:
                self._tiers_of.pop(key, None)
        for name, key in zip(names, keys, strict=True):
            if key in self._tiers_of or name not in self._keys_of:
                continue
            left = tuple(other for other in _as_tuple(self._keys_of[name]) if other != key)
            if left:
                self._keys_of[name] = left[0] if len(left) == 1 else left
            else:
                del self._keys_of[name]

    def keys_of(self, names: Sequence[int], prefix: bytes = b"") -> list[bytes]:
        """Of those that are there and whose key begins so, in the order of their names, without `prefix`."""
        found = [key for name in names for key in _as_tuple(self._keys_of.get(name, ()))]
        return [key[len(prefix) :] for key in found if key.startswith(prefix)]


def _as_tuple(keys: bytes | tuple[bytes, ...]) -> tuple[bytes, ...]:
    return keys if isinstance(keys, tuple) else (keys,)
