"""The table behind the prefix index: own block hash -> who holds it, in bounded memory.

Holders are a bitmask of slots; what a slot is, the index above knows. A block whose parent is in the table
keeps it there, so the table is always closed under prefixes, and forgetting goes from the leaves, least
recently used first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from router.core.block import Block
from router.core.block_hash import mix_extra, xxh3
from router.core.levels import levels

# What one block costs at the worst moment of its dicts' growth (CPython: a dict that has just doubled is one
# third full). tests/unit/router_core/test_block_table.py holds these against tracemalloc.
BLOCK_SIZE_BYTES = 64 + 2 * 48 + 2 * 60 + 48  # struct, two hashes, two dict entries, a mask of its own
LEAF_SIZE_BYTES = 192
ALIAS_SIZE_BYTES = 160  # one more engine hash for the same block: another recipe, another entry
STRANGER_SIZE_BYTES = 160  # an entry of a set that has just grown fourfold, and its number
_STRANGERS_SHARE = 8  # of the memory, they may have the eighth part


# (bytes of a block, hash of its prefix or a root's seed) -> hash of the prefix that it ends.
HashBlock = Callable[[bytes, int], int]


class BlockTable:
    """`alive` masks the slots that count: bits outside it are leftovers that `sweep` removes.

    Strangers are names of blocks whose tokens nobody has told yet. Who holds one is remembered until somebody
    does: a router that starts anew hears of stores, which know no tokens, before it hears of engines.
    """

    def __init__(self, max_size_bytes: int, hash_block: HashBlock = xxh3) -> None:
        self._hash_block = hash_block
        self.max_size_bytes = max_size_bytes
        self.alive = -1
        self.num_evicted = 0
        self._blocks: dict[int, Block] = {}
        self._by_engine_hash: dict[int, Block] = {}
        self._leaves: OrderedDict[Block, None] = OrderedDict()
        self._num_aliases = 0
        self._to_sweep: list[int] = []
        self._strangers: dict[int, set[int]] = {}  # by the bit of the slot that holds them
        self._num_strangers = 0

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def size_bytes(self) -> int:
        """Upper bound of the memory in use."""
        return (
            len(self._blocks) * BLOCK_SIZE_BYTES
            + len(self._leaves) * LEAF_SIZE_BYTES
            + self._num_aliases * ALIAS_SIZE_BYTES
            + self._num_strangers * STRANGER_SIZE_BYTES
        )

    def by_engine_hash(self, engine_hash: int) -> Block | None:
        return self._by_engine_hash.get(engine_hash)

    def holders(self, own_hash: int) -> int:
        block = self._blocks.get(own_hash)
        return block.holders & self.alive if block is not None else 0

    def names_held(self, own_hashes: Sequence[int], by: int, but_not: int) -> list[int]:
        """Engine hashes, all a block has, of blocks held by a slot of `by` and by none of `but_not`."""
        names: list[int] = []
        for own_hash in own_hashes:
            block = self._blocks.get(own_hash)
            if block is not None and block.holders & by and not block.holders & but_not:
                known = block.engine_hashes
                names.extend(known if isinstance(known, tuple) else (known,))
        return names

    def add_holder(self, engine_hashes: Sequence[int], slot_bit: int) -> int:
        """For blocks known by an engine hash, now or later. Returns how many were not."""
        num_unknown = 0
        for engine_hash in engine_hashes:
            block = self._by_engine_hash.get(engine_hash)
            if block is None:
                num_unknown += 1
                self._remember_stranger(engine_hash, slot_bit)
            else:
                block.holders |= slot_bit
        if num_unknown and self.size_bytes > self.max_size_bytes:
            self._evict()
        return num_unknown

    def store_chain(
        self,
        engine_hashes: Sequence[int],
        parent: Block | None,
        seed: int,
        data: bytes,
        block_bytes: int,
        extra_keys: Sequence[object] | None,
        slot_bit: int,
    ) -> None:
        """Blocks i = data[i * block_bytes : (i + 1) * block_bytes], each the parent of the next.

        `seed` starts the chain when it has no parent. Hashing stops being needed where engine hashes are
        known already: a prefix many engines hold is hashed once.
        """
        blocks, by_engine_hash, leaves = self._blocks, self._by_engine_hash, self._leaves
        # Any: hashes stay the objects they are. Taken for ints by mypyc, each below 2**62 would become an
        # object of its own wherever it is kept: 33 bytes more a block.
        names: Sequence[Any] = engine_hashes
        hash_block: Any = self._hash_block
        last: Any = parent
        fresh = False  # whether `last` was created here and is not among the leaves yet
        old_holders, new_holders = 0, slot_bit  # equal masks share one int
        for index, engine_hash in enumerate(names):
            block: Any = by_engine_hash.get(engine_hash)
            if block is None:
                own_hash: Any = seed if last is None else last.own_hash
                parent_hash = None if last is None else own_hash
                if extra_keys is not None and extra_keys[index] is not None:
                    own_hash = mix_extra(own_hash, extra_keys[index])
                own_hash = hash_block(data[index * block_bytes : (index + 1) * block_bytes], own_hash)
                block = blocks.get(own_hash)
                if block is None:
                    if last is not None:
                        if not last.num_children and not fresh:
                            del leaves[last]
                        last.num_children += 1
                    block = Block(own_hash, engine_hash, parent_hash, slot_bit, 0, False)
                    blocks[own_hash] = by_engine_hash[engine_hash] = block
                    if self._num_strangers:
                        block.holders |= self._no_longer_strange(engine_hash)
                    last = block
                    fresh = True
                    continue
                self._alias(block, engine_hash)
            if fresh:
                leaves[last] = None
            fresh = False
            if block.holders is not old_holders:
                old_holders = block.holders
                new_holders = old_holders | slot_bit
            block.holders = new_holders
            last = block
        if fresh:
            leaves[last] = None
        elif last is not None and not last.num_children:
            leaves.move_to_end(last)
        if self.size_bytes > self.max_size_bytes:
            self._evict()

    def remove_holder(self, engine_hashes: Sequence[int], slot_bit: int) -> None:
        for engine_hash in engine_hashes:
            block = self._by_engine_hash.get(engine_hash)
            if block is None:
                self._forget_stranger(engine_hash, slot_bit)
            elif block.holders & slot_bit:
                block.holders ^= slot_bit
                if not block.holders & self.alive and not block.num_children:
                    self._delete(block)

    def forget_strangers(self, slot_bit: int) -> None:
        """That slot holds nothing any more."""
        self._num_strangers -= len(self._strangers.pop(slot_bit, ()))

    def touch(self, own_hash: int) -> None:
        """A lookup ended at this block."""
        block = self._blocks.get(own_hash)
        if block is None:
            return
        if block.num_children:
            block.hot = True
        else:
            self._leaves.move_to_end(block)

    def levels(self, own_hashes: Sequence[int]) -> list[tuple[int, int]]:
        """(depth in blocks, slots whose deepest block that is), deepest first (see core.levels)."""
        return levels(self._blocks, own_hashes, self.alive)

    def begin_sweep(self) -> None:
        """Start removing the bits outside `alive`; whatever is stored from now on must not carry them."""
        self._to_sweep = list(self._blocks)

    def sweep(self, max_blocks: int) -> bool:
        """Look at up to `max_blocks` blocks. True when the sweep has been through the whole table."""
        for _ in range(min(max_blocks, len(self._to_sweep))):
            block = self._blocks.get(self._to_sweep.pop())
            if block is None or not block.holders & ~self.alive:
                continue
            block.holders &= self.alive
            if not block.holders and not block.num_children:
                self._delete(block)
        return not self._to_sweep

    def _alias(self, block: Block, engine_hash: int) -> None:
        names = block.engine_hashes
        block.engine_hashes = (*names, engine_hash) if isinstance(names, tuple) else (names, engine_hash)
        if self._num_strangers:
            block.holders |= self._no_longer_strange(engine_hash)
        self._by_engine_hash[engine_hash] = block
        self._num_aliases += 1

    def _remember_stranger(self, engine_hash: int, slot_bit: int) -> None:
        strangers = self._strangers.setdefault(slot_bit, set())
        has_room = self._num_strangers * STRANGER_SIZE_BYTES * _STRANGERS_SHARE < self.max_size_bytes
        if has_room and engine_hash not in strangers:
            strangers.add(engine_hash)
            self._num_strangers += 1

    def _forget_stranger(self, engine_hash: int, slot_bit: int) -> None:
        strangers = self._strangers.get(slot_bit, ())
        if engine_hash in strangers:
            self._strangers[slot_bit].discard(engine_hash)
            self._num_strangers -= 1

    def _no_longer_strange(self, engine_hash: int) -> int:
        """The slots that hold it."""
        holders = 0
        for slot_bit, strangers in self._strangers.items():
            if engine_hash in strangers:
                strangers.discard(engine_hash)
                self._num_strangers -= 1
                holders |= slot_bit
        return holders

    def _evict(self) -> None:
        while self._leaves and self.size_bytes > self.max_size_bytes:
            block = next(iter(self._leaves))
            if block.hot:
                block.hot = False
                self._leaves.move_to_end(block)
                continue
            self._delete(block)
            self.num_evicted += 1

    def _delete(self, block: Block) -> None:
        """Remove a leaf, and above it what nobody holds any more and only children kept."""
        while True:
            del self._blocks[block.own_hash]
            del self._leaves[block]
            names = block.engine_hashes
            if isinstance(names, tuple):
                self._num_aliases -= len(names) - 1
                for name in names:
                    del self._by_engine_hash[name]
            else:
                del self._by_engine_hash[names]
            if block.parent is None:
                return
            block = self._blocks[block.parent]
            block.num_children -= 1
            if block.num_children:
                return
            # Its own last use is not known, but it is older than its children's.
            self._leaves[block] = None
            self._leaves.move_to_end(block, last=False)
            if block.holders & self.alive:
                return

    def check(self) -> None:
        """AssertionError when the table contradicts itself (for tests and for `mooncake-router verify`)."""
        children: dict[int, int] = {}
        names = 0
        for own_hash, block in self._blocks.items():
            assert block.own_hash == own_hash
            own_names = (
                block.engine_hashes if isinstance(block.engine_hashes, tuple) else (block.engine_hashes,)
            )
            names += len(own_names)
            assert all(self._by_engine_hash[name] is block for name in own_names)
            if block.parent is not None:
                assert block.parent in self._blocks
                children[block.parent] = children.get(block.parent, 0) + 1
        assert names == len(self._by_engine_hash) == len(self._blocks) + self._num_aliases
        for own_hash, block in self._blocks.items():
            assert block.num_children == children.get(own_hash, 0)
            assert (block in self._leaves) == (block.num_children == 0)
        assert self.size_bytes <= self.max_size_bytes or not self._blocks
        assert self._num_strangers == sum(map(len, self._strangers.values()))
        assert all(self._by_engine_hash.keys().isdisjoint(names) for names in self._strangers.values())
