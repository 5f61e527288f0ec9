"""The table against a naive one, and its promises about memory."""

import random
import tracemalloc
from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from router.core.block_hash import block_hashes
from router.core.block_table import (
    ALIAS_SIZE_BYTES,
    BLOCK_SIZE_BYTES,
    LEAF_SIZE_BYTES,
    STRANGER_SIZE_BYTES,
    BlockTable,
)

BLOCK = 2  # tokens
UNLIMITED = 1 << 30


def store(table: BlockTable, token_ids: list[int], slot: int, recipe: int = 0, first_block: int = 0) -> None:
    """Blocks from `first_block` on; engine hashes are a function of the prefix and of the engine's recipe."""
    names = engine_hashes(token_ids, recipe)
    parent = table.by_engine_hash(names[first_block - 1]) if first_block else None
    data = array("I", token_ids[first_block * BLOCK :]).tobytes()
    table.store_chain(names[first_block:], parent, 0, data, BLOCK * 4, None, 1 << slot)


def engine_hashes(token_ids: list[int], recipe: int = 0) -> list[int]:
    return block_hashes(token_ids, BLOCK, seed=recipe + 1)


class NaiveTable(RuleBasedStateMachine):
    """Holders as a dict of sets. Without a cap nothing may ever be forgotten."""

    @initialize()
    def start(self) -> None:
        self.table = BlockTable(UNLIMITED)
        self.table.alive = 0b111
        self.held: dict[tuple[int, ...], set[int]] = {}
        self.strange: dict[tuple[int, ...], set[int]] = {}

    prompts = st.lists(st.sampled_from([1, 2]), min_size=BLOCK, max_size=5 * BLOCK)

    @rule(prompt=prompts, slot=st.integers(0, 2))
    def stored(self, prompt: list[int], slot: int) -> None:
        store(self.table, prompt, slot, recipe=slot // 2)
        for end in range(BLOCK, len(prompt) + 1, BLOCK):
            chain = tuple(prompt[:end])
            self.held.setdefault(chain, set()).add(slot)
            if slot // 2 == 0:
                self.held[chain] |= self.strange.pop(chain, set())

    @rule(prompt=prompts, slot=st.integers(0, 1))
    def named(self, prompt: list[int], slot: int) -> None:
        """By who knows no tokens; as engines of recipe 0 call them."""
        names = engine_hashes(prompt)
        known = [self.table.by_engine_hash(name) is not None for name in names]
        assert self.table.add_holder(names, 1 << slot) == known.count(False)
        for number, is_known in enumerate(known, 1):
            holders = self.held if is_known else self.strange
            holders.setdefault(tuple(prompt[: number * BLOCK]), set()).add(slot)

    @rule(slot=st.integers(0, 1))
    def forgotten(self, slot: int) -> None:
        self.table.forget_strangers(1 << slot)
        for slots in self.strange.values():
            slots.discard(slot)

    @rule(prompt=prompts, slot=st.integers(0, 2), order=st.randoms(use_true_random=False))
    def removed(self, prompt: list[int], slot: int, order: random.Random) -> None:
        """Everything under `prompt`, in any order: engines promise none within an event."""
        prefix = tuple(prompt[: len(prompt) // BLOCK * BLOCK])
        gone = [
            chain
            for chain, holders in [*self.held.items(), *self.strange.items()]
            if chain[: len(prefix)] == prefix and slot in holders
        ]
        order.shuffle(gone)
        self.table.remove_holder([engine_hashes(list(chain), slot // 2)[-1] for chain in gone], 1 << slot)
        for chain in gone:
            for holders in (self.held, self.strange):
                holders.get(chain, set()).discard(slot)

    @rule(prompt=prompts)
    def looked_up(self, prompt: list[int]) -> None:
        own = block_hashes(prompt, BLOCK)
        expected: dict[int, int] = {}
        for depth in range(1, len(own) + 1):
            for slot in self.held.get(tuple(prompt[: depth * BLOCK]), ()):
                expected[slot] = depth
        found = {s: depth for depth, holders in self.table.levels(own) for s in range(3) if holders >> s & 1}
        assert found == expected
        self.table.touch(own[-1])

    @invariant()
    def sound(self) -> None:
        self.table.check()
        for chain, holders in self.held.items():
            own = block_hashes(list(chain), BLOCK)[-1]
            assert self.table.holders(own) == sum(1 << slot for slot in holders)
        assert self.table.num_blocks >= sum(1 for holders in self.held.values() if holders)


NaiveTable.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestNaiveTable = NaiveTable.TestCase


def test_blocks_nobody_holds_are_gone() -> None:
    table = BlockTable(UNLIMITED)
    store(table, list(range(20)), slot=0)
    store(table, list(range(10)), slot=1)
    names = engine_hashes(list(range(20)))
    table.remove_holder(names, 1)  # parents first: they stay until their children are gone
    assert table.num_blocks == 5
    table.remove_holder(names, 2)
    assert table.num_blocks == 0 and table.size_bytes == 0
    table.check()


def test_two_recipes_name_the_same_block() -> None:
    table = BlockTable(UNLIMITED)
    prompt = list(range(8))
    store(table, prompt, slot=0, recipe=0)
    store(table, prompt, slot=1, recipe=7)
    assert table.num_blocks == 4
    assert table.levels(block_hashes(prompt, BLOCK)) == [(4, 0b11)]
    assert table.size_bytes == 4 * (BLOCK_SIZE_BYTES + ALIAS_SIZE_BYTES) + LEAF_SIZE_BYTES
    table.remove_holder(engine_hashes(prompt, 0), 1)
    assert table.levels(block_hashes(prompt, BLOCK)) == [(4, 0b10)]
    table.remove_holder(engine_hashes(prompt, 7), 2)
    assert table.num_blocks == 0
    table.check()


def test_known_hashes_without_tokens() -> None:
    table = BlockTable(UNLIMITED)
    prompt = list(range(8))
    store(table, prompt, slot=0)
    assert table.add_holder([*engine_hashes(prompt)[:2], 12345], 0b10) == 1
    assert table.levels(block_hashes(prompt, BLOCK)) == [(4, 0b01), (2, 0b10)]


def test_names_heard_before_their_tokens_count_once_these_are_told() -> None:
    table = BlockTable(UNLIMITED)
    prompt = list(range(8))
    names = engine_hashes(prompt)
    assert table.add_holder([*names, 12345], 0b10) == 5
    assert (table.num_blocks, table.size_bytes) == (0, 5 * STRANGER_SIZE_BYTES)
    table.remove_holder(names[3:], 0b10)
    store(table, prompt, slot=0)
    assert table.levels(block_hashes(prompt, BLOCK)) == [(4, 0b01), (3, 0b10)]
    assert table.size_bytes == 4 * BLOCK_SIZE_BYTES + LEAF_SIZE_BYTES + STRANGER_SIZE_BYTES
    table.forget_strangers(0b10)
    assert table.size_bytes == 4 * BLOCK_SIZE_BYTES + LEAF_SIZE_BYTES
    table.check()


def test_strangers_stay_within_their_share_of_the_memory() -> None:
    table = BlockTable(800_000)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for name in range(1 << 40, (1 << 40) + 50_000):
        table.add_holder([name], 0b10)
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert used <= table.size_bytes <= 100_000 + STRANGER_SIZE_BYTES
    store(table, list(range(8)), slot=0)
    table.check()


def chain(number: int, num_blocks: int) -> list[int]:
    return [number * 1000 + i for i in range(num_blocks * BLOCK)]


def test_cap_forgets_the_least_recently_used_leaves_first() -> None:
    table = BlockTable(10 * BLOCK_SIZE_BYTES + 4 * LEAF_SIZE_BYTES)
    for number in range(3):
        store(table, chain(number, 3), slot=0)
    table.touch(block_hashes(chain(0, 3), BLOCK)[-1])
    store(table, chain(3, 3), slot=0)
    depths = [table.levels(block_hashes(chain(n, 3), BLOCK)) for n in range(4)]
    assert depths == [[(3, 1)], [(1, 1)], [(3, 1)], [(3, 1)]]  # the tail of chain 1 went
    assert table.num_evicted == 2
    table.check()


def test_a_prefix_that_lookups_end_at_outlives_its_children() -> None:
    table = BlockTable(8 * BLOCK_SIZE_BYTES + 3 * LEAF_SIZE_BYTES)
    store(table, chain(0, 4), slot=0)
    table.touch(block_hashes(chain(0, 4), BLOCK)[1])  # a system prompt of two blocks
    store(table, chain(1, 3), slot=0)
    store(table, chain(2, 3), slot=0)
    assert table.levels(block_hashes(chain(0, 4), BLOCK)) == [(2, 1)]
    table.check()


def test_the_cap_holds_whatever_comes() -> None:
    table = BlockTable(20_000)
    order = random.Random(5)
    for _ in range(2000):
        prompt = [order.randrange(3) for _ in range(order.randrange(BLOCK, 30))]
        store(table, prompt, slot=order.randrange(3), recipe=order.randrange(2))
        assert table.size_bytes <= 20_000
    assert table.num_evicted > 0
    table.check()


def test_sweep_clears_dead_slots_and_keeps_the_rest() -> None:
    table = BlockTable(UNLIMITED)
    table.alive = 0b11
    for number in range(50):
        store(table, chain(number, 4), slot=number % 2)
    store(table, chain(0, 4), slot=1)
    table.alive = 0b10
    table.begin_sweep()
    while not table.sweep(7):
        table.check()
    table.alive = 0b11  # the slot can be given away
    assert table.num_blocks == 26 * 4
    assert table.levels(block_hashes(chain(0, 4), BLOCK)) == [(4, 0b10)]
    assert table.levels(block_hashes(chain(2, 4), BLOCK)) == []
    table.check()


@pytest.mark.parametrize("blocks_per_chain, slots, recipes", [(64, 1, 1), (1, 1, 1), (16, 3, 1), (16, 2, 2)])
def test_size_bytes_bounds_the_memory_really_used(blocks_per_chain: int, slots: int, recipes: int) -> None:
    order = random.Random(1)
    prompts = [
        [order.randrange(1 << 17) for _ in range(blocks_per_chain * BLOCK)]
        for _ in range(12_000 // blocks_per_chain)
    ]
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    table = BlockTable(UNLIMITED)
    for prompt in prompts:
        for slot in range(slots):
            store(table, prompt, slot, recipe=slot % recipes)
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert 0.4 * table.size_bytes < used <= table.size_bytes


def test_a_very_long_chain_is_freed_without_recursion() -> None:
    table = BlockTable(UNLIMITED)
    prompt = list(range(400_000))
    store(table, prompt, slot=0)
    assert table.num_blocks == 200_000
    del table


def test_a_hash_is_one_object_wherever_it_is_kept() -> None:
    """Else a block takes more memory than it says: compiled code makes new objects of ints below 2**62."""
    table, prompt = BlockTable(UNLIMITED), chain(0, 64)
    store(table, prompt, 0)
    own, names = block_hashes(prompt, BLOCK), engine_hashes(prompt)
    assert min(own) < 1 << 62 and min(names) < 1 << 62
    kept = {number: number for number in table._blocks}
    kept_names = {number: number for number in table._by_engine_hash}
    parent = None
    for own_hash, name in zip(own, names, strict=True):
        block = table.by_engine_hash(name)
        assert block is not None
        assert block.own_hash is kept[own_hash] and block.parent is parent
        assert block.engine_hashes is kept_names[name]
        parent = block.own_hash
