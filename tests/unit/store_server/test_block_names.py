"""From names in events back to keys."""

from hypothesis import given
from hypothesis import strategies as st

from kvcore.wire.messages import Tier
from store_server.core.block_names import BlockNames

TIERS = (Tier.DRAM, Tier.SSD, Tier.REMOTE)


def key(name: int, rank: int = 0) -> bytes:
    return b"tenant" + rank.to_bytes(4, "big") + name.to_bytes(8, "big")


STEPS = st.tuples(st.booleans(), st.integers(0, 5), st.integers(0, 2), st.sampled_from(TIERS))


@given(st.lists(STEPS, max_size=60))
def test_a_block_has_its_keys_while_some_tier_has_them(steps: list[tuple[bool, int, int, Tier]]) -> None:
    names, held = BlockNames(), set()
    for is_stored, name, rank, tier in steps:
        both = [name, name + 100]  # as vLLM and SGLang call it
        if is_stored:
            names.stored(both, [key(name, rank)] * 2, tier)
            held.add((name, rank, tier))
        else:
            names.removed(both, [key(name, rank)] * 2, tier)
            held.discard((name, rank, tier))
        there = {(name, rank) for name, rank, _ in held}
        found = names.keys_of(range(6))
        assert sorted(found) == sorted(key(*one) for one in there)
        assert [found_key[-8:] for found_key in found] == sorted(found_key[-8:] for found_key in found)
        assert names.keys_of(range(100, 106)) == found
        assert len(names) == 2 * len({name for name, _ in there})


def test_tenants_see_their_own_as_they_name_them() -> None:
    names = BlockNames()
    names.stored([1, 2], [b"aaaa1", b"bbbb2"], Tier.DRAM)
    assert names.keys_of([2, 1, 3], b"aaaa") == [b"1"]
    assert names.keys_of([2, 1, 3]) == [b"bbbb2", b"aaaa1"]
