"""Ranks and engines share a page exactly when its bytes mean the same to both."""

import itertools
from typing import Any

import pytest

from kvcore.keys import Namespace
from kvcore.wire.events import HashForm, block_hash_of_key
from mooncake_connector.namespace import EngineFacts as VllmFacts
from mooncake_connector.namespace import build_namespace
from sglang_hicache_backend.keys import EngineFacts, PageKeys, PoolFacts, RankFacts, pool_namespaces
from tests.unit.mooncake_connector.rig import connector_config, engine_facts, host_memory, make_layers
from tests.unit.sglang_hicache_backend import rig

HASHES = rig.page_hashes(3)
RANK = RankFacts(tp_rank=1, tp_size=4, pp_rank=1, pp_size=2, attn_cp_rank=1, attn_cp_size=2)


def pool_facts(**changes: Any) -> PoolFacts:
    values: dict[str, Any] = {
        "name": "kv",
        "kind": "MHATokenToKVPoolHost",
        "dtype": "torch.bfloat16",
        "form": "page_first layers=0-4 regions 64+64",
        "page_size_tokens": 16,
        "object_size_bytes": 128,
        "num_layers": 4,
    }
    return PoolFacts(**values | changes)


def keys(
    rank: RankFacts = RANK, pool: PoolFacts | None = None, engine: EngineFacts | None = None
) -> list[bytes]:
    pool = pool or pool_facts()
    namespaces = pool_namespaces(engine or rig.engine_facts(), rank, pool)
    return PageKeys(namespaces, pool.name)(HASHES)


@pytest.mark.parametrize(
    "change",
    [
        {"architecture": "QwenForCausalLM"},
        {"weights_id": "fine-tuned"},
        {"engine": '{"quantization": "fp8"}'},
        {"tenant": "b"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_model_weights_setting_or_tenant_is_another_key(change: dict[str, str]) -> None:
    assert not set(keys(engine=rig.engine_facts(**change))) & set(keys())


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "torch.float8_e4m3fn"},
        {"form": "page_first_direct layers=0-4 regions 64+64"},
        {"form": "page_first layers=0-4 flat 128"},
        {"kind": "AsymmetricMHATokenToKVPoolHost"},
        {"page_size_tokens": 32},
        {"object_size_bytes": 256},
        {"num_layers": 5},
        {"name": "swa"},
    ],
    ids=lambda change: "-".join(map(str, next(iter(change.items())))),
)
def test_another_dtype_layout_size_or_pool_is_another_key(change: dict[str, Any]) -> None:
    assert not set(keys(pool=pool_facts(**change))) & set(keys())


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_ranks_of_sharded_kv_never_share(tp_size: int) -> None:
    ranks = [RankFacts(tp_rank=rank, tp_size=size) for size in (1, 2, 4) for rank in range(size)]
    mine = [RankFacts(tp_rank=rank, tp_size=tp_size) for rank in range(tp_size)]
    for one, other in itertools.product(mine, ranks):
        shared = set(keys(one)) & set(keys(other))
        assert bool(shared) == (one == other)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_replicated_kv_is_one_page_for_all_tp_ranks_and_sizes(tp_size: int) -> None:
    mla = pool_facts(is_replicated=True)
    ranks = [RankFacts(tp_rank=rank, tp_size=tp_size, is_replicated=True) for rank in range(tp_size)]
    assert {tuple(keys(rank, mla)) for rank in ranks} == {tuple(keys(RankFacts(is_replicated=True), mla))}
    assert [rank.is_writer for rank in ranks] == [True] + [False] * (tp_size - 1)


def test_pipeline_and_context_ranks_never_share() -> None:
    mla = pool_facts(is_replicated=True)
    ranks = [
        RankFacts(pp_rank=pp, pp_size=2, attn_cp_rank=cp, attn_cp_size=2, is_replicated=True)
        for pp in range(2)
        for cp in range(2)
    ]
    ranks += [
        RankFacts(tp_rank=tp, tp_size=4, dcp_rank=tp % 2, dcp_size=2, is_replicated=True) for tp in (0, 1)
    ]
    ranks += [RankFacts(pp_size=3, is_replicated=True), RankFacts(is_replicated=True)]
    found = [tuple(keys(rank, mla)) for rank in ranks]
    assert len(set(found)) == len(ranks)


def test_each_shard_of_decode_context_parallelism_has_one_writer() -> None:
    ranks = [
        RankFacts(tp_rank=tp, tp_size=4, dcp_rank=tp % 2, dcp_size=2, is_replicated=True) for tp in range(4)
    ]
    assert [rank.is_writer for rank in ranks] == [True, True, False, False]
    mla = pool_facts(is_replicated=True)
    assert keys(ranks[0], mla) == keys(ranks[2], mla) != keys(ranks[1], mla) == keys(ranks[3], mla)


def test_pages_split_by_heads_are_the_pages_of_a_larger_tp_size() -> None:
    whole = keys(RankFacts(tp_rank=1, tp_size=2), pool_facts(num_heads_split=2, object_size_bytes=64))
    quarters = [keys(RankFacts(tp_rank=rank, tp_size=4), pool_facts(object_size_bytes=64)) for rank in (2, 3)]
    assert whole == [key for pair in zip(*quarters, strict=True) for key in pair]


def test_kv_pages_go_by_the_names_of_sglangs_events() -> None:
    for key, page_hash in zip(keys(), HASHES, strict=True):
        name = int.from_bytes(bytes.fromhex(page_hash[:16]), "big", signed=True)
        assert block_hash_of_key(key, HashForm.SGLANG) == name


def test_pages_of_other_pools_do_not_pass_for_kv_in_events() -> None:
    known = {block_hash_of_key(key, HashForm.SGLANG) for key in keys()}
    assert not known & {block_hash_of_key(key, HashForm.SGLANG) for key in keys(pool=pool_facts(name="swa"))}


def test_a_page_hash_that_is_no_hex_is_a_name_like_any_other() -> None:
    page_keys = PageKeys(pool_namespaces(rig.engine_facts(), RANK, pool_facts()), "kv")
    assert len(set(page_keys(["not hex", "also not hex", "ab"]))) == 3


def test_vllm_and_sglang_never_share_a_block_of_the_same_model() -> None:
    """Their bytes lie in different orders: shared they would be wrong KV."""
    facts: VllmFacts = engine_facts()
    config = connector_config()
    vllm = build_namespace(facts, host_memory(make_layers()).layout, config)
    (sglang,) = pool_namespaces(
        EngineFacts(architecture=vllm.model, weights_id=vllm.weights_id, engine="{}", tenant=vllm.tenant),
        RankFacts(),
        pool_facts(
            dtype=vllm.kv_dtype,
            page_size_tokens=vllm.block_size_tokens,
            object_size_bytes=vllm.block_size_bytes,
            num_layers=vllm.num_layers,
        ),
    )
    differing = {name for name in Namespace.__struct_fields__ if getattr(vllm, name) != getattr(sglang, name)}
    assert differing >= {"engine", "engine_layout", "hash_scheme"}
    assert vllm.digest() != sglang.digest()
