"""Ranks find their own pages, and each other's exactly where the bytes are the same: with SGLang's host pools
and its HiCacheStorageConfig, for tensor-parallel sizes 1, 2 and 4, and MLA."""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.engine.rig import StoreProcess
from tests.engine.sglang.bare import HEADS, BareRank, suite_extra_config, torch

pytestmark = pytest.mark.sglang

NewRank = Callable[..., BareRank]
HASHES = [hashlib.sha256(bytes([number])).hexdigest() for number in range(3)]
MHA_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
MLA_LAYOUTS = ("layer_first", "page_first", "page_first_direct")


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Random bytes may be NaNs, which are equal to nothing."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@pytest.fixture
def new_rank(shared_store: StoreProcess, request: pytest.FixtureRequest) -> Iterator[NewRank]:
    ranks: list[BareRank] = []

    def make(*, extra: dict[str, Any] | None = None, **options: Any) -> BareRank:
        config = suite_extra_config(shared_store, extra_backend_tag=request.node.name, **(extra or {}))
        ranks.append(BareRank(config, **options))
        return ranks[-1]

    yield make
    for rank in ranks:
        rank.backend.close()


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_each_tp_rank_finds_its_own_pages(new_rank: NewRank, tp_size: int) -> None:
    ranks = [{"tp_rank": rank, "tp_size": tp_size, "heads": HEADS // tp_size} for rank in range(tp_size)]
    writers = [new_rank(**rank).fill(seed) for seed, rank in enumerate(ranks)]
    for writer in writers:
        assert writer.backend.batch_exists(HASHES) == 0
        assert writer.save(HASHES, 4, 1, 2) == [True] * 3
    for writer, rank in zip(writers, ranks, strict=True):
        reader = new_rank(**rank)
        assert reader.backend.batch_exists(HASHES) == 3
        assert reader.load(HASHES, 0, 5, 3) == [True] * 3
        for origin, place in ((4, 0), (1, 5), (2, 3)):
            assert torch.equal(writer.page(origin), reader.page(place))


def test_engines_of_different_tp_sizes_share_nothing(new_rank: NewRank) -> None:
    """Also where a rank's pages happen to have the same size."""
    new_rank(tp_rank=0, tp_size=1).fill(1).save(HASHES, 0, 1, 2)
    for rank in ({"tp_rank": 0, "tp_size": 2}, {"tp_rank": 1, "tp_size": 2}, {"pp_rank": 0, "pp_size": 2}):
        assert new_rank(**rank).backend.batch_exists(HASHES) == 0
    assert new_rank(attn_cp_rank=0, attn_cp_size=2).backend.batch_exists(HASHES) == 0


@pytest.mark.parametrize("layout", MLA_LAYOUTS)
def test_mla_is_written_by_one_rank_and_read_by_all_of_every_size(new_rank: NewRank, layout: str) -> None:
    mla = {"kind": "mla", "layout": layout}
    writer = new_rank(tp_rank=0, tp_size=4, **mla).fill(1)
    assert writer.save(HASHES, 4, 1, 2) == [True] * 3
    for tp_size in (1, 2, 4):
        for tp_rank in range(tp_size):
            reader = new_rank(tp_rank=tp_rank, tp_size=tp_size, **mla)
            assert reader.config.is_storage_writer == (tp_rank == 0)
            assert reader.load(HASHES, 0, 5, 3) == [True] * 3
            for origin, place in ((4, 0), (1, 5), (2, 3)):
                assert torch.equal(writer.page(origin), reader.page(place))


def test_a_rank_that_is_no_writer_writes_nothing_even_when_asked(new_rank: NewRank) -> None:
    other = new_rank(tp_rank=1, tp_size=2, kind="mla").fill(1)
    assert other.backend.batch_set_v1(HASHES, other.slots(0, 1, 2)) == [True] * 3
    assert other.backend.batch_exists(HASHES) == 0


def test_shards_of_decode_context_parallelism_stay_apart(new_rank: NewRank) -> None:
    dcp = {"kind": "mla", "tp_size": 4, "dcp_size": 2, "logical_page_size": 32}
    writers = [new_rank(tp_rank=rank, dcp_rank=rank, **dcp).fill(rank) for rank in range(2)]
    for writer in writers:
        assert writer.save(HASHES, 4, 1, 2) == [True] * 3
    for tp_rank in (2, 3):
        reader = new_rank(tp_rank=tp_rank, dcp_rank=tp_rank % 2, **dcp)
        assert not reader.config.is_storage_writer
        assert reader.load(HASHES, 0, 5, 3) == [True] * 3
        assert torch.equal(reader.page(0), writers[tp_rank % 2].page(4))


@pytest.mark.parametrize("layout", MHA_LAYOUTS)
def test_layouts_and_interfaces_share_nothing_with_each_other(new_rank: NewRank, layout: str) -> None:
    new_rank(layout=layout).fill(1).save(HASHES, 0, 1, 2)
    for other in MHA_LAYOUTS:
        assert new_rank(layout=other).backend.batch_exists(HASHES) == (3 if other == layout else 0)
    flat = new_rank(layout=layout, extra={"interface_v1": 0})
    assert flat.backend.batch_exists(HASHES) == 0


def test_pages_split_by_heads_are_shared_by_engines_of_different_tp_sizes(new_rank: NewRank) -> None:
    """tp_lcm_size 4 in both: one rank with all heads, then four with one head each, and back."""
    split = {"layout": "page_head", "tp_lcm_size": 4}
    whole = new_rank(should_split_heads=True, **split).fill(1)
    assert whole.save(HASHES, 4, 1, 2) == [True] * 3
    quarters = [new_rank(tp_rank=rank, tp_size=4, heads=1, **split) for rank in range(4)]
    for rank, quarter in enumerate(quarters):
        assert quarter.load(HASHES, 0, 5, 3) == [True] * 3
        assert same_bytes(quarter.pool.kv_buffer[:, 5, 0], whole.pool.kv_buffer[:, 1, rank])
    halves = [new_rank(tp_rank=rank, tp_size=2, heads=2, should_split_heads=True, **split) for rank in (0, 1)]
    more = [hashlib.sha256(page_hash.encode()).hexdigest() for page_hash in HASHES]
    for rank, half in enumerate(halves):
        half.fill(seed=10 + rank).save(more, 0, 1, 2)
    assert whole.load(more, 5, 6, 7) == [True] * 3
    together = torch.cat([half.pool.kv_buffer[:, 2] for half in halves], dim=1)
    assert same_bytes(whole.pool.kv_buffer[:, 7], together)


@pytest.mark.parametrize("layout", MLA_LAYOUTS)
def test_an_indexer_travels_beside_its_kv(new_rank: NewRank, layout: str) -> None:
    """In layer_first it gives no addresses, and SGLang copies its pages."""
    dsa = {"kind": "dsa", "layout": layout, "tp_size": 2}
    writer, reader = new_rank(tp_rank=0, **dsa).fill(1), new_rank(tp_rank=1, **dsa)
    question = [reader.transfer("indexer", HASHES, 0, 1, 2)]
    assert writer.save(HASHES, 4, 1, 2) == [True] * 3
    assert reader.backend.batch_exists_v2(HASHES, question).kv_hit_pages == 0
    stored = writer.backend.batch_set_v2([writer.transfer("indexer", HASHES[:2], 4, 1)])
    assert stored == {"indexer": [True] * 2}
    found = reader.backend.batch_exists_v2(HASHES, question)
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (2, [1, 2])
    assert found.extra_pool_hit_pages == {"kv": 3, "indexer": 2}
    assert reader.load(HASHES[:2], 0, 5) == [True] * 2
    loaded = reader.backend.batch_get_v2([reader.transfer("indexer", HASHES, 0, 5, 3)])
    assert loaded == {"indexer": [True, True, False]}
    for name in ("kv", "indexer"):
        for origin, place in ((4, 0), (1, 5)):
            assert torch.equal(writer.page(origin, name), reader.page(place, name))


def test_clear_takes_the_pages_of_this_rank_alone(new_rank: NewRank) -> None:
    ranks = [new_rank(tp_rank=rank, tp_size=2, heads=2).fill(rank) for rank in range(2)]
    for rank in ranks:
        rank.save(HASHES, 0, 1, 2)
    ranks[0].backend.clear()
    assert [rank.backend.batch_exists(HASHES) for rank in ranks] == [0, 3]


def test_numbers_come_as_sglang_wants_them(new_rank: NewRank) -> None:
    rank = new_rank().fill(1)
    assert rank.backend.get_stats() is None
    rank.save(HASHES, 0, 1, 2)
    rank.load(HASHES[:2], 3, 4)
    stats = rank.backend.get_stats()
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([3], [2])
    assert stats.backup_bandwidth[0] > 0
    assert stats.prefetch_bandwidth[0] > 0
    assert rank.backend.get_stats() is None


def test_a_closed_backend_has_nothing_and_another_takes_its_place(new_rank: NewRank) -> None:
    """Detached and attached again at run time."""
    rank = new_rank().fill(1)
    rank.save(HASHES, 0, 1, 2)
    rank.backend.close()
    rank.backend.close()
    assert rank.backend.batch_exists(HASHES) == 0
    assert rank.load(HASHES, 3, 4, 5) == [False] * 3
    assert new_rank().load(HASHES, 3, 4, 5) == [True] * 3
