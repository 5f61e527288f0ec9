"""Prefix-aware, around any other policy: a block is worth nothing without the blocks before it.

Two rules. A block that has children is not evicted before them: of those the inner policy would give up, the
first without children goes. And a block whose parent was evicted nevertheless goes before all others, unless
the parent comes back first. Parents are known as far as writers told them; an object without a parent is like
any other. Only when every block without children must stay does one with children go.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

from store_server.core.eviction.base import Evictable, EvictionPolicy

# Blocks with children passed over in one search. Fewer cost little, and stay where they are in the inner
# order.
_LONG_SEARCH = 256


class _Link:
    """A block in the tree of prefixes, there only if it has a parent or children. `entry`: of one with a
    parent."""

    __slots__ = ("entry", "first_child", "key", "next", "parent", "previous")

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.entry: Evictable | None = None
        self.parent: _Link | None = None
        self.first_child: _Link | None = None
        self.next: _Link | None = None
        self.previous: _Link | None = None

    def children(self) -> "Iterator[_Link]":
        child = self.first_child
        while child is not None:
            yield child
            child = child.next


class PrefixAwarePolicy:
    def __init__(self, inner: EvictionPolicy) -> None:
        self._inner = inner
        self._links: dict[bytes, _Link] = {}
        self._orphans: OrderedDict[bytes, Evictable] = OrderedDict()
        self._parked: dict[bytes, Evictable] = {}
        self.bytes_per_object = inner.bytes_per_object + 195

    def on_insert(self, entry: Evictable, parent: bytes | None = None) -> None:
        self._inner.on_insert(entry, parent)
        has_parent = parent is not None and parent != entry.key
        link = self._links.get(entry.key)
        if link is None:
            if not has_parent:
                return
            link = self._links[entry.key] = _Link(entry.key)
        link.entry = entry
        if has_parent:
            assert parent is not None
            self._attach(link, parent)
        for child in link.children():
            self._orphans.pop(child.key, None)

    def on_access(self, keys: Iterable[bytes]) -> None:
        self._inner.on_access(keys)

    def on_remove(self, key: bytes, *, evicted: bool = False) -> None:
        self._inner.on_remove(key, evicted=evicted)
        self._parked.pop(key, None)
        link = self._links.get(key)
        if link is None:
            return
        self._orphans.pop(key, None)
        link.entry = None
        self._detach(link)
        if evicted:
            # Only then: a block that was pinned leaves its policy, too, and is still there for its children.
            self._orphans.update((child.key, child.entry) for child in link.children() if child.entry)
        self._drop_if_useless(link)

    def victim(self, evictable: Callable[[Evictable], bool]) -> Evictable | None:
        for entry in self._orphans.values():
            if evictable(entry):
                return entry
        links, passed_over = self._links, list[Evictable]()

        def is_evictable_leaf(entry: Evictable) -> bool:
            link = links.get(entry.key)
            if link is not None and link.first_child is not None:
                passed_over.append(entry)
                return False
            return evictable(entry)

        victim = self._inner.victim(is_evictable_leaf)
        if len(passed_over) > _LONG_SEARCH:
            self._park(passed_over)
        if victim is None:
            victim = self._inner.victim(evictable) or next(filter(evictable, self._parked.values()), None)
        return victim

    def __contains__(self, key: bytes) -> bool:
        return key in self._inner or key in self._parked

    def __len__(self) -> int:
        return len(self._inner) + len(self._parked)

    def _park(self, entries: Iterable[Evictable]) -> None:
        """Out of the inner order, as long as they have children: or every search would pass over them again.
        Readers of the ends of prefixes, who leave their begins looking unused, bring that about."""
        for entry in entries:
            self._inner.on_remove(entry.key)
            self._parked[entry.key] = entry

    def _attach(self, link: _Link, parent_key: bytes) -> None:
        parent = self._links.get(parent_key)
        if parent is None:
            parent = self._links[parent_key] = _Link(parent_key)
        link.parent, link.next = parent, parent.first_child
        if parent.first_child is not None:
            parent.first_child.previous = link
        parent.first_child = link

    def _detach(self, link: _Link) -> None:
        parent = link.parent
        if parent is None:
            return
        if link.previous is None:
            parent.first_child = link.next
        else:
            link.previous.next = link.next
        if link.next is not None:
            link.next.previous = link.previous
        link.parent = link.next = link.previous = None
        if parent.first_child is None and (entry := self._parked.pop(parent.key, None)):
            self._inner.on_insert(entry, parent.parent.key if parent.parent else None)
        self._drop_if_useless(parent)

    def _drop_if_useless(self, link: _Link) -> None:
        if link.first_child is None and link.parent is None and link.entry is None:
            self._links.pop(link.key, None)
