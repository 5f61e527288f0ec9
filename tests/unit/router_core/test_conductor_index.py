"""The index behind Conductor's interface: the standard hash, and what may not be mixed."""

import struct

import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvcore.wire.events import AllBlocksCleared, BlockRemoved, BlockStored, Medium
from router.core import conductor_index
from router.core.conductor_index import ConductorIndex, Publisher, Scope, standard_hashes

SCOPE = Scope("m", "", "default", 4, "")
TOKENS = list(range(100, 116))
HASHES = [11, 12, 13, 14]


def publisher(instance: str = "i0", rank: int = 0, scope: Scope = SCOPE) -> Publisher:
    return Publisher(instance, rank, scope)


def stored(num_blocks: int, medium: Medium = Medium.GPU, lora: str = "", **more: object) -> BlockStored:
    return BlockStored(
        HASHES[:num_blocks],
        None,
        TOKENS[: 4 * num_blocks],
        4,
        medium,
        lora_name=lora,
        **more,  # type: ignore[arg-type]
    )


def longest(index: ConductorIndex, scope: Scope = SCOPE) -> dict[str, int]:
    return {name: held.longest_matched for name, held in index.query(scope, TOKENS, 0.0).items()}


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 8))
def test_hashes_are_those_of_the_documents(tokens: list[int], block_size: int) -> None:
    """local[i] = XXH3(tokens LE u32); seq[0] = local[0]; seq[i] = XXH3(seq[i-1] LE || local[i] LE)."""
    expected: list[int] = []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        block = tokens[start : start + block_size]
        local = xxhash.xxh3_64_intdigest(struct.pack(f"<{block_size}I", *block), 0)
        if expected:
            local = xxhash.xxh3_64_intdigest(struct.pack("<QQ", expected[-1], local), 0)
        expected.append(local)
    assert standard_hashes(tokens, block_size) == expected


def test_media_and_ranks_are_told_apart() -> None:
    index = ConductorIndex(1 << 20)
    index.apply(publisher(rank=0), [stored(2), stored(3, Medium.CPU)])
    index.apply(publisher(rank=1), [stored(4)])
    index.apply(publisher("i1"), [stored(1, Medium.DISK)])
    found = index.query(SCOPE, TOKENS, 0.0)
    assert found["i0"].longest_matched == 16
    assert found["i0"].by_rank == {"0": 12, "1": 16}
    assert found["i0"].by_medium == {"GPU": 16, "CPU": 12, "DISK": 0, "EXTERNAL": 0}
    assert found["i1"].by_medium["DISK"] == 4
    by_hash = index.query_by_hash(SCOPE, standard_hashes(TOKENS, 4), 0.0)
    assert by_hash == found


def test_removals_clearings_and_departures() -> None:
    index = ConductorIndex(1 << 20)
    for name in ("i0", "i1"):
        index.apply(publisher(name), [stored(4)])
    index.apply(publisher("i0"), [BlockRemoved(HASHES[2:])])
    assert longest(index) == {"i0": 8, "i1": 16}
    index.apply(publisher("i1"), [AllBlocksCleared()])
    assert longest(index) == {"i0": 8, "i1": 0}
    index.remove(publisher("i1"))
    assert longest(index) == {"i0": 8}
    index.remove(publisher("i0"))
    assert longest(index) == {} and index.num_scopes == 0


def test_models_tenants_salts_and_loras_are_worlds_apart() -> None:
    index = ConductorIndex(1 << 20)
    index.apply(publisher(), [stored(2), stored(3, lora="sql", extra_keys=[["sql"]] * 3)])
    salted = SCOPE._replace(salt="w8a8")
    index.apply(publisher("quantised", scope=salted), [stored(1)])
    assert longest(index) == {"i0": 8}
    assert longest(index, SCOPE._replace(lora_name="sql")) == {"i0": 12}
    assert longest(index, salted) == {"quantised": 4}
    for other in (SCOPE._replace(model="n"), SCOPE._replace(tenant_id="t"), SCOPE._replace(block_size=8)):
        assert longest(index, other) == {}


def test_a_salt_of_requests_is_found_in_the_scope_without_salt() -> None:
    index = ConductorIndex(1 << 20)
    index.apply(publisher(), [stored(2, cache_salt="mine")])
    assert longest(index) == {"i0": 0}
    assert longest(index, SCOPE._replace(salt="mine")) == {"i0": 8}
    assert longest(index, SCOPE._replace(salt="yours")) == {"i0": 0}


def test_scopes_are_bounded() -> None:
    index = ConductorIndex(1 << 20)
    for number in range(conductor_index.MAX_SCOPES + 3):
        index.apply(publisher(), [stored(1, lora=f"l{number}")])
    assert index.num_scopes == conductor_index.MAX_SCOPES and index.num_dropped_events == 3
