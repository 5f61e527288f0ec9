"""Prefix-aware, around any other policy: a block is worth nothing without the blocks before it.

Two rules. A block that has children is not evicted before them: of those the inner policy would give up, the
first without children goes. And a block whose parent was evicted nevertheless goes before all others, unless
the parent comes back first. Parents are known as far as writers told them; an object without a parent is like
any other.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable

from store_server.core.eviction.base import Evictable, EvictionPolicy


class PrefixAwarePolicy:
    def __init__(self, inner: EvictionPolicy) -> None:
        self._inner = inner
        self._parent_of: dict[bytes, bytes] = {}
        self._children_of: dict[bytes, dict[bytes, Evictable]] = {}  # also of parents that are not here
        self._orphans: OrderedDict[bytes, Evictable] = OrderedDict()

    def on_insert(self, entry: Evictable, parent: bytes | None = None) -> None:
        self._inner.on_insert(entry, parent)
        if parent is not None:
            self._parent_of[entry.key] = parent
            self._children_of.setdefault(parent, {})[entry.key] = entry
        for child in self._children_of.get(entry.key, ()):
            self._orphans.pop(child, None)

    def on_access(self, keys: Iterable[bytes]) -> None:
        self._inner.on_access(keys)

    def on_remove(self, key: bytes, *, evicted: bool = False) -> None:
        self._inner.on_remove(key, evicted=evicted)
        self._orphans.pop(key, None)
        parent = self._parent_of.pop(key, None)
        if parent is not None:
            siblings = self._children_of[parent]
            del siblings[key]
            if not siblings:
                del self._children_of[parent]
        if evicted:
            # Only then: a block that was pinned leaves its policy, too, and is still there for its children.
            self._orphans.update(self._children_of.get(key, {}))

    def victim(self, evictable: Callable[[Evictable], bool]) -> Evictable | None:
        for entry in self._orphans.values():
            if evictable(entry):
                return entry
        children_of = self._children_of
        return self._inner.victim(lambda entry: entry.key not in children_of and evictable(entry))

    def __contains__(self, key: bytes) -> bool:
        return key in self._inner

    def __len__(self) -> int:
        return len(self._inner)
