"""The prefix index: events in, matches out."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.wire.events import AllBlocksCleared, BlockRemoved, BlockStored, Medium
from router.core.block_hash import block_hashes, root_seed
from router.core.prefix_index import MAX_LORA_NAMES, PrefixIndex
from router.core.view import NO_WORKER, InstanceState

BLOCK = 4
PROMPT = list(range(100, 124))  # six blocks
OWN = block_hashes(PROMPT, BLOCK)


def engine_hashes(prompt: list[int]) -> list[int]:
    return block_hashes(prompt, BLOCK, seed=99)


def stored(
    prompt: list[int], medium: Medium = Medium.GPU, first_block: int = 0, **fields: object
) -> BlockStored:
    names = engine_hashes(prompt)
    parent = names[first_block - 1] if first_block else None
    return BlockStored(
        names[first_block:],
        parent,
        prompt[first_block * BLOCK :],
        BLOCK,
        medium,
        **fields,  # type: ignore[arg-type]
    )


def local(index: PrefixIndex, worker: int, own: list[int] = OWN, store_worker: int = NO_WORKER) -> int:
    instance = InstanceState("i", worker, store_worker)
    return index.match(own, 0.0).local_blocks_of((instance,))[0]


def by_medium(index: PrefixIndex, worker: int, store_worker: int = NO_WORKER) -> tuple[int, int, int, int]:
    return index.match(OWN, 0.0).blocks_by_medium(InstanceState("i", worker, store_worker))


@pytest.fixture
def index() -> PrefixIndex:
    return PrefixIndex(BLOCK)


def test_a_stored_prefix_is_found_by_its_tokens(index: PrefixIndex) -> None:
    a, b = index.add_worker("a"), index.add_worker("b")
    index.apply(a, [stored(PROMPT)])
    index.apply(b, [stored(PROMPT[: 2 * BLOCK])])
    assert (local(index, a), local(index, b)) == (6, 2)
    other = block_hashes([*PROMPT[: 3 * BLOCK], 7, 7, 7, 7], BLOCK)
    assert (local(index, a, other), local(index, b, other)) == (3, 2)
    assert local(index, a, block_hashes([7] * 8, BLOCK)) == 0
    assert index.match([], 0.0).best_blocks == 0


def test_events_that_continue_a_chain(index: PrefixIndex) -> None:
    a = index.add_worker("a")
    index.apply(a, [stored(PROMPT[: 2 * BLOCK]), stored(PROMPT, first_block=2)])
    assert local(index, a) == 6
    index.apply(a, [BlockRemoved(engine_hashes(PROMPT)[4:])])
    assert local(index, a) == 4
    index.apply(a, [AllBlocksCleared()])
    assert local(index, a) == 0


def test_a_child_of_unknown_parents_is_counted_and_left_out(index: PrefixIndex) -> None:
    a = index.add_worker("a")
    index.apply(a, [stored(PROMPT, first_block=2)])
    assert local(index, a) == 0
    assert index.stats.unknown_parent == 4


def test_parents_learned_from_another_worker_will_do(index: PrefixIndex) -> None:
    a, b = index.add_worker("a"), index.add_worker("b")
    index.apply(a, [stored(PROMPT[: 2 * BLOCK])])
    index.apply(b, [stored(PROMPT, first_block=2)])
    assert index.stats.unknown_parent == 0
    assert index.table.holders(OWN[5]) != 0


def test_partial_last_blocks_are_left_out(index: PrefixIndex) -> None:
    a = index.add_worker("a")
    names = engine_hashes(PROMPT)
    index.apply(a, [BlockStored(names, None, PROMPT[:-1], BLOCK)])
    assert local(index, a) == 5
    index.table.check()


def test_other_block_sizes_and_bad_tokens_are_counted(index: PrefixIndex) -> None:
    a = index.add_worker("a")
    index.apply(a, [BlockStored([1], None, [1, 2], 2), BlockStored([1], None, [1, 2, 3, -4], BLOCK)])
    assert (index.stats.other_block_size, index.stats.bad_events) == (1, 1)
    assert index.table.num_blocks == 0


def test_only_full_attention_groups_are_indexed(index: PrefixIndex) -> None:
    a = index.add_worker("a")
    window = stored(PROMPT, group_idx=0, kv_cache_spec_kind="sliding_window")
    full = stored(PROMPT, group_idx=1, kv_cache_spec_kind="full_attention")
    index.apply(a, [window])
    assert local(index, a) == 0
    index.apply(a, [full, BlockRemoved(engine_hashes(PROMPT), group_idx=0)])
    assert local(index, a) == 6
    index.apply(a, [BlockRemoved(engine_hashes(PROMPT), group_idx=1)])
    assert local(index, a) == 0


def test_media_add_up_and_the_fastest_counts(index: PrefixIndex) -> None:
    a, node = index.add_worker("a"), index.add_worker("store", shared=True)
    index.apply(a, [stored(PROMPT[: 5 * BLOCK]), stored(PROMPT[: 3 * BLOCK], Medium.DISK)])
    assert by_medium(index, a) == (5, 0, 0, 0)
    assert not PrefixIndex(BLOCK).match(OWN, 0.0).has_slow_media
    index.apply(a, [BlockRemoved(engine_hashes(PROMPT)[1:5])])
    assert by_medium(index, a) == (1, 0, 2, 0)
    index.apply(node, [BlockStored(engine_hashes(PROMPT)[:2], None, [], 0, Medium.CPU)])
    assert by_medium(index, a, node) == (1, 1, 1, 0)
    assert local(index, a, store_worker=node) == 3
    match = index.match(OWN, 0.0)
    assert (match.best_blocks, match.best_worker, match.best_medium) == (2, node, Medium.CPU)
    assert match.has_slow_media


def test_an_exclusive_lower_tier_continues_the_upper_one(index: PrefixIndex) -> None:
    a = index.add_worker("a")
    index.apply(a, [stored(PROMPT)])
    names = engine_hashes(PROMPT)
    index.apply(a, [BlockStored(names[3:], None, [], 0, Medium.CPU), BlockRemoved(names[3:])])
    assert by_medium(index, a) == (3, 3, 0, 0)


def test_best_prefix_counts_only_what_can_be_fetched(index: PrefixIndex) -> None:
    private, shared = index.add_worker("a"), index.add_worker("b", shared=True)
    index.apply(private, [stored(PROMPT)])
    assert index.match(OWN, 0.0).best_worker == NO_WORKER
    index.apply(shared, [stored(PROMPT[: 2 * BLOCK], Medium.CPU)])
    match = index.match(OWN, 0.0)
    assert (match.best_blocks, match.best_worker) == (2, shared)


def test_the_fastest_medium_is_the_source(index: PrefixIndex) -> None:
    disk, cpu = index.add_worker("disk", shared=True), index.add_worker("cpu", shared=True)
    index.apply(cpu, [stored(PROMPT, Medium.CPU)])
    index.apply(disk, [stored(PROMPT, Medium.DISK)])
    match = index.match(OWN, 0.0)
    assert (match.best_worker, match.best_medium) == (cpu, Medium.CPU)


def test_salts_adapters_and_images_never_match_plain_prompts(index: PrefixIndex) -> None:
    a = index.add_worker("a")
    names = [1, 2, 3, 4, 5, 6]
    salted = block_hashes(PROMPT, BLOCK, root_seed("", "tenant"))
    lora = block_hashes(PROMPT, BLOCK, root_seed("sql", ""))
    both = block_hashes(PROMPT, BLOCK, root_seed("sql", "tenant"))
    image = block_hashes(PROMPT, BLOCK, extra_keys={1: [["img", 5]]})

    def check(event: BlockStored, found: list[int]) -> None:
        index.apply(a, [event])
        for own in (OWN, salted, lora, both, image):
            expected = 6 if own is found else (1 if {id(own), id(found)} == {id(OWN), id(image)} else 0)
            assert local(index, a, own) == expected
        index.apply(a, [AllBlocksCleared()])
        while index.sweep():
            pass

    none = [None] * 5
    check(BlockStored(names, None, PROMPT, BLOCK), OWN)
    check(BlockStored(names, None, PROMPT, BLOCK, extra_keys=[["tenant"], *none]), salted)  # vLLM
    check(BlockStored(names, None, PROMPT, BLOCK, cache_salt="tenant"), salted)  # SGLang
    check(BlockStored(names, None, PROMPT, BLOCK, lora_name="sql"), lora)  # before extra_keys
    check(BlockStored(names, None, PROMPT, BLOCK, lora_name="sql", extra_keys=[["sql"]] * 6), lora)
    check(
        BlockStored(
            names, None, PROMPT, BLOCK, lora_name="sql", extra_keys=[["sql", "tenant"], *[["sql"]] * 5]
        ),
        both,
    )
    check(BlockStored(names, None, PROMPT, BLOCK, extra_keys=[None, [["img", 5]], *none[1:]]), image)


def test_clearing_a_worker_is_immediate_and_its_slot_comes_back(index: PrefixIndex) -> None:
    a, b = index.add_worker("a", shared=True), index.add_worker("b", shared=True)
    index.apply(a, [stored(PROMPT)])
    index.apply(b, [stored(PROMPT[: 2 * BLOCK])])
    index.clear_worker(a)
    assert (local(index, a), local(index, b)) == (0, 2)
    assert index.match(OWN, 0.0).best_worker == b
    index.apply(a, [stored(PROMPT[:BLOCK])])  # before anything was swept
    assert (local(index, a), local(index, b)) == (1, 2)
    while index.sweep(1):
        pass
    assert index.table.num_blocks == 2
    assert not index.sweep()
    for _ in range(10):
        index.clear_worker(b)
        index.apply(b, [stored(PROMPT)])
        while index.sweep():
            pass
    assert index.num_slots <= 4
    assert (local(index, a), local(index, b)) == (1, 6)
    index.table.check()


def test_a_removed_workers_number_is_given_away_clean(index: PrefixIndex) -> None:
    a = index.add_worker("a")
    index.apply(a, [stored(PROMPT, group_idx=3, kv_cache_spec_kind="full_attention")])
    index.place(a, OWN, 0.0)
    index.remove_worker(a)
    b = index.add_worker("b", shared=True)
    assert b == a and index.worker_ids == {b: "b"}
    assert local(index, b) == 0
    index.apply(b, [stored(PROMPT, group_idx=0)])
    assert index.match(OWN, 0.0).best_worker == b


def test_predicted_placement_counts_until_events_come(index: PrefixIndex) -> None:
    a, b = index.add_worker("a"), index.add_worker("b")
    index.place(a, OWN, 0.0)
    assert (local(index, a), local(index, b)) == (6, 0)
    assert by_medium(index, a) == (6, 0, 0, 0)
    assert index.match(OWN, 0.0).best_blocks == 0  # nothing to fetch yet
    index.clear_worker(a)
    assert local(index, a) == 0


def test_after_the_prefill_events_are_the_truth() -> None:
    index = PrefixIndex(BLOCK, predicted_ttl_s=60.0)
    a, silent = index.add_worker("a"), index.add_worker("silent")
    index.apply(a, [stored(PROMPT)])
    placements = [index.place(worker, OWN, 0.0, expected_at=1.0) for worker in (a, silent)]
    failed = index.place(silent, block_hashes([7] * 8, BLOCK), 0.0, expected_at=1.0)
    index.apply(a, [BlockRemoved(engine_hashes(PROMPT)[2:])])
    for placement in placements:
        index.placed(placement, 1.0, succeeded=True)
    index.placed(failed, 1.0, succeeded=False)
    instances = (InstanceState("a", a), InstanceState("silent", silent))
    assert index.match(OWN, 1.5).local_blocks_of(instances) == [6, 6]
    # The engine that publishes has the last word; of the silent one we know nothing better.
    assert index.match(OWN, 2.5).local_blocks_of(instances) == [2, 6]
    assert index.match(block_hashes([7] * 8, BLOCK), 1.5).local_blocks_of(instances) == [0, 0]


def test_the_cap_is_never_passed() -> None:
    index = PrefixIndex(BLOCK, max_size_bytes=60_000)
    order = random.Random(3)
    workers = [index.add_worker(str(n)) for n in range(4)]
    for _ in range(300):
        prompt = [order.randrange(50) for _ in range(BLOCK * order.randrange(1, 20))]
        index.apply(order.choice(workers), [stored(prompt)])
        assert index.size_bytes <= 60_000
    assert index.table.num_evicted > 0


step = st.tuples(
    st.sampled_from(["store", "remove", "clear", "sweep"]),
    st.integers(0, 2),
    st.lists(st.sampled_from([1, 2]), min_size=1, max_size=4),
    st.sampled_from([Medium.GPU, Medium.CPU]),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(step, max_size=40), st.lists(st.sampled_from([1, 2]), min_size=1, max_size=4))
def test_against_a_dict_of_sets(steps: list[tuple[str, int, list[int], Medium]], asked: list[int]) -> None:
    """Workers store prefixes and remove whole subtrees, leaves first, as engines do."""
    index = PrefixIndex(BLOCK)
    for name in "abc":
        index.add_worker(name)
    held: dict[tuple[int, Medium], set[tuple[int, ...]]] = {}
    for action, worker, path, medium in steps:
        prompt = [token for token in path for _ in range(BLOCK)]
        blocks = held.setdefault((worker, medium), set())
        if action == "store":
            index.apply(worker, [stored(prompt, medium)])
            blocks.update(tuple(path[:n]) for n in range(1, len(path) + 1))
        elif action == "remove":
            gone = sorted((b for b in blocks if b[: len(path)] == tuple(path)), key=len, reverse=True)
            names = [engine_hashes([token for token in b for _ in range(BLOCK)])[-1] for b in gone]
            index.apply(worker, [BlockRemoved(names, medium)])
            blocks.difference_update(gone)
        elif action == "clear":
            index.apply(worker, [AllBlocksCleared()])
            held = {key: value for key, value in held.items() if key[0] != worker}
        else:
            index.sweep(2)
    index.table.check()
    own = block_hashes([token for token in asked for _ in range(BLOCK)], BLOCK)
    match = index.match(own, 0.0)
    for worker in range(3):
        depths = [
            max(
                (n for n in range(1, len(asked) + 1) if tuple(asked[:n]) in held.get((worker, m), set())),
                default=0,
            )
            for m in Medium
        ]
        instance = InstanceState("i", worker)
        assert match.local_blocks_of((instance,)) == [max(depths)]
        gpu, cpu, *_ = match.blocks_by_medium(instance)
        assert (gpu, cpu) == (depths[0], max(0, depths[1] - depths[0]))


def test_names_of_adapters_are_bounded_and_the_newest_are_kept() -> None:
    index = PrefixIndex(BLOCK)
    worker = index.add_worker("a")

    def seen(name: str) -> None:
        index.apply(worker, [BlockStored([1], None, PROMPT[:BLOCK], BLOCK, lora_name=name)])

    for number in range(MAX_LORA_NAMES):
        seen(f"adapter-{number}")
    seen("adapter-0")  # in use
    seen("x" * 100_000)
    assert len(index.lora_names) == MAX_LORA_NAMES
    seen("one more")
    assert len(index.lora_names) == MAX_LORA_NAMES
    assert {"adapter-0", "one more", "adapter-2"} <= index.lora_names.keys()
    assert "adapter-1" not in index.lora_names


def test_numbers_of_workers_that_left_are_given_to_the_next_the_lowest_first() -> None:
    index = PrefixIndex(BLOCK)
    a, b, c = (index.add_worker(name) for name in "abc")
    index.remove_worker(c)
    index.remove_worker(a)
    assert [index.add_worker(name) for name in "def"] == [a, c, 3]
    assert index.worker_ids == {b: "b", a: "d", c: "e", 3: "f"}
