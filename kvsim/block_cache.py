"""The KV blocks one node keeps in DRAM and below that on SSD, ordered by the store's own eviction
policies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvcore.errors import ConfigError
from store_server.core.eviction import POLICIES, Evictable, EvictionPolicy


class _Block:
    __slots__ = ("key", "size_bytes")

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.size_bytes = 1


class Changes:
    """What one call moved; keys in the order it happened."""

    __slots__ = ("from_dram", "from_ssd", "to_dram", "to_ssd")

    def __init__(self) -> None:
        self.to_dram: list[bytes] = []
        self.from_dram: list[bytes] = []
        self.to_ssd: list[bytes] = []
        self.from_ssd: list[bytes] = []


class BlockCache:
    """Capacities in blocks. A block is in DRAM or on SSD, never in both; what DRAM evicts goes to the SSD,
    and what is used there comes back.

    The rules of the store: blocks of a prompt count as used from last to first, so that the leaf goes before
    the root; those of the prompt in hand are not evicted for each other; when there is no room for a block
    the rest of its prompt is not kept.
    """

    def __init__(self, eviction_policy: str, dram_blocks: int, ssd_blocks: int = 0) -> None:
        if eviction_policy not in POLICIES:
            raise ConfigError(
                f"no eviction policy {eviction_policy!r}; there are: {', '.join(sorted(POLICIES))}"
            )
        self.dram_blocks = dram_blocks
        self.ssd_blocks = ssd_blocks
        self.dram: EvictionPolicy = POLICIES[eviction_policy]()
        self.ssd: EvictionPolicy = POLICIES[eviction_policy]()

    def __len__(self) -> int:
        return len(self.dram) + len(self.ssd)

    def __contains__(self, key: bytes) -> bool:
        return key in self.dram or key in self.ssd

    def leading(self, keys: Sequence[bytes]) -> tuple[int, int]:
        """(leading blocks held, how many of those lie on SSD)."""
        on_ssd = 0
        dram, ssd = self.dram, self.ssd
        for index, key in enumerate(keys):
            if key in dram:
                continue
            if key not in ssd:
                return index, on_ssd
            on_ssd += 1
        return len(keys), on_ssd

    def keep(self, keys: Sequence[bytes]) -> Changes:
        """The blocks of one prompt were used or computed: all of them, from the first."""
        changes = Changes()
        held, _ = self.leading(keys)
        self.dram.on_access(reversed(keys[:held]))
        own = set(keys)
        kept: list[tuple[bytes, bytes | None]] = []
        for index, key in enumerate(keys):
            if key in self.dram:
                continue
            if not self._make_room(len(kept) + 1, lambda block: block.key not in own, changes):
                break
            if key in self.ssd:
                self.ssd.on_remove(key)
                changes.from_ssd.append(key)
            kept.append((key, keys[index - 1] if index else None))
        for key, parent in reversed(kept):
            self.dram.on_insert(_Block(key), parent)
        changes.to_dram = [key for key, _ in kept]
        return changes

    def shrink(self, dram_blocks: int) -> Changes:
        """A new capacity, at once."""
        changes = Changes()
        self.dram_blocks = dram_blocks
        self._make_room(0, lambda block: True, changes)
        return changes

    def _make_room(self, wanted: int, evictable: Callable[[Evictable], bool], changes: Changes) -> bool:
        while len(self.dram) + wanted > self.dram_blocks:
            victim = self.dram.victim(evictable)
            if victim is None:
                return False
            self.dram.on_remove(victim.key, evicted=True)
            changes.from_dram.append(victim.key)
            if self.ssd_blocks:
                self._spill(victim.key, changes)
        return True

    def _spill(self, key: bytes, changes: Changes) -> None:
        while len(self.ssd) >= self.ssd_blocks:
            victim = self.ssd.victim(lambda block: True)
            if victim is None:
                return
            self.ssd.on_remove(victim.key, evicted=True)
            changes.from_ssd.append(victim.key)
        self.ssd.on_insert(_Block(key))
        changes.to_ssd.append(key)
