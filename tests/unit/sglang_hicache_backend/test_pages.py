"""Pages of every layout and interface travel through the store and come back byte for byte, or not at all."""

import threading
import time
from typing import Any

import numpy as np
import pytest

from kvcore.client.fake import FakeStore
from kvcore.wire.messages import Status
from sglang_hicache_backend.keys import RankFacts
from tests.unit.sglang_hicache_backend.rig import Engine, HostTensor, LogicalPool, MhaPool, page_hashes

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


def transfer(store: FakeStore, source: MhaPool, target: MhaPool, **options: Any) -> list[bool]:
    """Pages 5, 0 and 3 of one engine become pages 1, 6 and 2 of another."""
    hashes = page_hashes(3)
    assert Engine(store, source, **options).backend.save("kv", hashes, source.slots(5, 0, 3)) == [True] * 3
    reader = Engine(store, target, **options)
    assert reader.backend.num_leading(hashes) == 3
    return reader.backend.load("kv", hashes, target.slots(1, 6, 2))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_travel_in_place_in_every_layout(store: FakeStore, layout: str) -> None:
    source, target = MhaPool(layout, fill=1), MhaPool(layout)
    assert transfer(store, source, target) == [True] * 3
    for origin, place in ((5, 1), (0, 6), (3, 2)):
        assert np.array_equal(source.page(origin), target.page(place))
    for untouched in (0, 3, 4, 5, 7):
        assert not target.page(untouched).any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_travel_flat_where_the_pool_gives_no_addresses(store: FakeStore, layout: str) -> None:
    source, target = (MhaPool(layout, fill=fill, gives_addresses=False) for fill in (1, None))
    assert transfer(store, source, target) == [True] * 3
    assert np.array_equal(source.page(5), target.page(1))
    assert not target.page(0).any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_generic_interface_takes_and_gives_tensors(store: FakeStore, layout: str) -> None:
    source, hashes = MhaPool(layout, fill=1), page_hashes(3)
    generic = {"extra_config": {"interface_v1": 0}}
    writer = Engine(store, source, **generic).backend
    assert writer.save_flat(hashes, [source.get_data_page(page * 4) for page in (5, 0, 3)]) == [True] * 3
    targets = [source.get_dummy_flat_data_page() for _ in range(4)]
    reader = Engine(store, MhaPool(layout), **generic).backend
    assert reader.load_flat([*hashes, "00" * 32], targets) == [True, True, True, False]
    for page, target in zip((5, 0, 3), targets, strict=False):
        assert np.array_equal(source.page(page).reshape(-1), target.array)


def test_both_interfaces_never_take_each_others_pages(store: FakeStore) -> None:
    """In layer_first their bytes lie in different orders."""
    source, hashes = MhaPool("layer_first", fill=1), page_hashes(2)
    Engine(store, source).backend.save("kv", hashes, source.slots(0, 1))
    other = Engine(store, MhaPool("layer_first"), extra_config={"interface_v1": 0}).backend
    assert other.num_leading(hashes) == 0


def test_layouts_never_take_each_others_pages(store: FakeStore) -> None:
    hashes = page_hashes(2)
    for number, layout in enumerate(LAYOUTS):
        pool = MhaPool(layout, fill=number)
        engine = Engine(store, pool).backend
        assert engine.num_leading(hashes) == 0
        assert engine.save("kv", hashes, pool.slots(0, 1)) == [True, True]


def test_engines_of_different_tp_sizes_share_pages_split_by_heads(store: FakeStore) -> None:
    """SGLang's tp_lcm_size: one rank of one with 4 heads, then two ranks of two with 2 heads each."""
    whole, hashes = MhaPool("page_head", heads=4, fill=1), page_hashes(2)
    single = Engine(store, whole, rank=RankFacts(), num_heads_split=2).backend
    assert single.save("kv", hashes, whole.slots(2, 3)) == [True, True]
    for tp_rank in range(2):
        half = MhaPool("page_head", heads=2)
        backend = Engine(store, half, rank=RankFacts(tp_rank=tp_rank, tp_size=2)).backend
        assert backend.load("kv", hashes, half.slots(0, 1)) == [True, True]
        heads = whole.page(2)[:, tp_rank * 2 : tp_rank * 2 + 2]
        assert np.array_equal(half.page(0), heads)
    again = MhaPool("page_head", heads=4)
    assert Engine(store, again, num_heads_split=2).backend.load("kv", hashes, again.slots(4, 5)) == [True] * 2
    assert np.array_equal(again.page(4), whole.page(2))


def test_a_page_of_which_one_half_is_lost_is_a_miss(store: FakeStore) -> None:
    whole, hashes = MhaPool("page_head", fill=1), page_hashes(3)
    engine = Engine(store, whole, num_heads_split=2)
    engine.backend.save("kv", hashes, whole.slots(0, 1, 2))
    store.lose([list(store.objects)[3]])
    assert engine.backend.num_leading(hashes) == 1
    assert engine.backend.load("kv", hashes, whole.slots(0, 1, 2)) == [True, False, True]


def test_of_replicated_kv_only_the_writer_saves(store: FakeStore) -> None:
    pool, hashes = MhaPool(fill=1), page_hashes(2)
    ranks = [RankFacts(tp_rank=rank, tp_size=2, is_replicated=True) for rank in range(2)]
    writer, other = (Engine(store, pool, rank=rank).backend for rank in ranks)
    assert other.save("kv", hashes, pool.slots(0, 1)) == [True, True]
    assert not store.objects
    writer.save("kv", hashes, pool.slots(0, 1))
    assert other.num_leading(hashes) == 2
    target = MhaPool()
    reader = Engine(store, target, rank=ranks[1]).backend
    assert reader.load("kv", hashes, target.slots(0, 1)) == [True, True]
    assert np.array_equal(target.page(1), pool.page(1))


def test_a_recurrent_state_stays_sharded_beside_replicated_kv(store: FakeStore) -> None:
    hashes = page_hashes(1)
    for tp_rank in range(2):
        state = MhaPool(fill=tp_rank)
        rank = RankFacts(tp_rank=tp_rank, tp_size=2, is_replicated=True)
        engine = Engine(store, MhaPool(), rank=rank)
        engine.add_pool(state, "mamba")
        assert engine.backend.save("mamba", hashes, state.slots(0)) == [True]
    assert len(store.objects) == 2


def test_other_pools_decide_with_the_kv_pool(store: FakeStore) -> None:
    hashes = page_hashes(6)
    kv, swa = MhaPool(fill=1), MhaPool(fill=2)
    engine = Engine(store, kv)
    engine.add_pool(swa, "swa")
    backend = engine.backend
    window = [("swa", "trailing_pages", 2)]
    assert backend.save("kv", hashes[:5], kv.slots(*range(5))) == [True] * 5
    assert backend.restorable(hashes, window).lengths == []
    backend.save("swa", hashes[2:4], swa.slots(6, 7))
    found = backend.restorable(hashes, window)
    assert (found.num_pages, found.by_pool, found.lengths) == (4, {"kv": 5, "swa": 4}, [4])
    target = MhaPool()
    engine.add_pool(target, "swa")
    assert backend.load("swa", hashes[2:4], target.slots(0, 1)) == [True, True]
    assert np.array_equal(target.page(1), swa.page(7))


def test_a_pool_that_nobody_registered_has_nothing(store: FakeStore) -> None:
    hashes, pool = page_hashes(2), MhaPool(fill=1)
    backend = Engine(store, pool).backend
    backend.save("kv", hashes, pool.slots(0, 1))
    assert backend.restorable(hashes, [("indexer", "all_pages", 0)]).num_pages == 0
    assert backend.load("indexer", hashes, pool.slots(0, 1)) == [False, False]
    assert backend.save("indexer", hashes, pool.slots(0, 1)) == [False, False]


def test_block_groups_never_bound_a_prefix(store: FakeStore) -> None:
    hashes, pool = page_hashes(2), MhaPool(fill=1)
    backend = Engine(store, pool).backend
    backend.save("kv", hashes, pool.slots(0, 1))
    assert backend.restorable(hashes, [("deepseek_v4_c4", "block_groups", 1)]).lengths == [1, 2]


def test_an_anchor_without_memory_says_what_the_other_pools_say(store: FakeStore) -> None:
    hashes, side = page_hashes(3), MhaPool(fill=1)
    engine = Engine(store, LogicalPool())
    engine.add_pool(side, "deepseek_v4_c4")
    backend = engine.backend
    assert backend.save("kv", hashes, np.arange(12)) == [True] * 3
    assert backend.num_leading(hashes) == 0
    assert backend.restorable(hashes, [("deepseek_v4_c4", "all_pages", 0)]).num_pages == 0
    backend.save("deepseek_v4_c4", hashes[:2], side.slots(0, 1))
    assert backend.restorable(hashes, [("deepseek_v4_c4", "all_pages", 0)]).lengths == [1, 2]
    assert backend.load("kv", hashes, np.arange(12)) == [True] * 3


def test_prefixes_are_told_for_eviction(store: FakeStore) -> None:
    hashes, kv, state = page_hashes(4), MhaPool(fill=1), MhaPool(fill=2)
    engine = Engine(store, kv)
    engine.add_pool(state, "mamba")
    engine.backend.save("mamba", hashes[3:], state.slots(0))
    engine.backend.save("kv", hashes[:2], kv.slots(0, 1), [])
    engine.backend.save("kv", hashes[2:], kv.slots(2, 3), hashes[:2])
    parents = engine.clients["save"].parents
    state_key, *kv_keys = parents
    assert [parents[key] for key in kv_keys] == [b"", *kv_keys[:3]]
    assert parents[state_key] == kv_keys[3]


def test_what_is_there_is_not_written_again(store: FakeStore) -> None:
    hashes, pool = page_hashes(3), MhaPool(fill=1)
    engine = Engine(store, pool)
    engine.backend.save("kv", hashes[:2], pool.slots(0, 1))
    assert engine.backend.save("kv", hashes, pool.slots(0, 1, 2)) == [True] * 3
    writes = [keys for name, keys in engine.clients["save"].calls if name == "write_layers"]
    assert [len(keys) for keys in writes] == [2, 1]


def test_a_full_store_takes_no_page(store: FakeStore) -> None:
    hashes, pool = page_hashes(2), MhaPool(fill=1)
    backend = Engine(store, pool).backend
    store.full = True
    assert backend.save("kv", hashes, pool.slots(0, 1)) == [False, False]
    store.full = False
    assert backend.save("kv", hashes, pool.slots(0, 1)) == [True, True]


def test_a_page_that_was_not_written_keeps_nobody_from_writing_it(store: FakeStore) -> None:
    hashes, pool = page_hashes(2), MhaPool(fill=1)
    backend = Engine(store, pool).backend
    store.fail_next("write", Status.TIMED_OUT)
    assert backend.save("kv", hashes, pool.slots(0, 1)) == [False, True]
    assert Engine(store, pool).backend.save("kv", hashes, pool.slots(0, 1)) == [True, True]
    assert backend.num_leading(hashes) == 2


@pytest.mark.parametrize("trouble", ["down", "late"])
def test_a_store_that_does_not_answer_is_a_store_without_pages(store: FakeStore, trouble: str) -> None:
    hashes, pool = page_hashes(2), MhaPool(fill=1)
    timeouts = dict.fromkeys(("lookup_timeout_ms", "load_timeout_ms", "save_timeout_ms"), 20)
    backend = Engine(store, pool, extra_config=timeouts).backend
    assert backend.save("kv", hashes, pool.slots(0, 1)) == [True, True]
    if trouble == "down":
        store.stop()
    else:
        store.delay_ms = 60_000
    assert backend.num_leading(hashes) == 0
    assert backend.restorable(hashes, [("swa", "trailing_pages", 1)]).num_pages == 0
    assert backend.load("kv", hashes, pool.slots(0, 1)) == [False, False]
    assert backend.save("kv", page_hashes(2, salt=1), pool.slots(0, 1)) == [False, False]
    backend.clear()
    assert backend.errors_total == 0


def test_clear_removes_what_engines_like_this_one_stored_and_nothing_else(store: FakeStore) -> None:
    hashes, pool, other_pool = page_hashes(5), MhaPool(fill=1), MhaPool("layer_first", fill=2)
    mine, other = Engine(store, pool), Engine(store, other_pool)
    swa = MhaPool(fill=3)
    mine.add_pool(swa, "swa")
    mine.backend.save("kv", hashes, pool.slots(*range(5)))
    mine.backend.save("swa", hashes[4:], swa.slots(0))
    other.backend.save("kv", hashes, other_pool.slots(*range(5)))
    Engine(store, pool).backend.clear()
    assert len(store.objects) == 6  # an engine without the swa pool knows nothing of its pages
    mine.backend.clear()
    assert mine.backend.num_leading(hashes) == 0
    assert other.backend.num_leading(hashes) == 5
    assert len(store.objects) == 5


def test_three_threads_use_one_backend_at_once(store: FakeStore) -> None:
    source, target = MhaPool(num_pages=64, fill=1), MhaPool(num_pages=64)
    backend = Engine(store, source).backend
    reader = Engine(store, target).backend
    hashes, failures = page_hashes(64), []

    def save() -> None:
        for first in range(0, 64, 8):
            pages = range(first, first + 8)
            if not all(backend.save("kv", hashes[first : first + 8], source.slots(*pages))):
                failures.append(f"save {first}")

    def load() -> None:
        for first in range(0, 64, 8):
            pages = range(first, first + 8)
            while reader.num_leading(hashes[: first + 8]) < first + 8:
                time.sleep(0.001)
            if not all(reader.load("kv", hashes[first : first + 8], target.slots(*pages))):
                failures.append(f"load {first}")

    def look() -> None:
        seen = 0
        while seen < 64:
            found = reader.num_leading(hashes)
            if found < seen:
                failures.append(f"look {found} after {seen}")
            seen = found
            time.sleep(0.001)

    threads = [threading.Thread(target=each) for each in (save, load, look)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert np.array_equal(source.array, target.array)


def test_numbers_are_taken_once(store: FakeStore) -> None:
    hashes, pool = page_hashes(4), MhaPool(fill=1)
    backend = Engine(store, pool).backend
    assert backend.stats.take() is None
    backend.save("kv", hashes[:3], pool.slots(0, 1, 2))
    backend.load("kv", hashes, pool.slots(0, 1, 2, 3))
    taken = backend.stats.take()
    assert taken is not None
    loads, saves = taken
    assert (loads.pages, saves.pages) == ([3], [3])
    assert loads.gib_per_s[0] > 0
    assert backend.stats.take() is None


def test_tensors_of_another_size_are_misses(store: FakeStore) -> None:
    hashes, pool = page_hashes(1), MhaPool(fill=1)
    backend = Engine(store, pool, extra_config={"interface_v1": 0}).backend
    backend.save_flat(hashes, [pool.get_data_page(0)])
    assert backend.load_flat(hashes, [HostTensor(np.zeros(7, dtype=np.uint16))]) == [False]
    assert backend.load_flat(hashes, []) == [False]
