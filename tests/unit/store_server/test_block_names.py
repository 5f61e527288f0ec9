"""From names in events back to keys."""

from hypothesis import given
from hypothesis import strategies as st

from kvcore.wire.messages import Tier
from store_server.core.block_names import BlockNames

TIERS = (Tier.DRAM, Tier.SSD, Tier.REMOTE)


def key(name: int) -> bytes:
    return b"tenant" + name.to_bytes(8, "big")


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.sampled_from(TIERS)), max_size=60))
def test_a_block_has_a_key_while_some_tier_has_it(steps: list[tuple[bool, int, Tier]]) -> None:
    names, held = BlockNames(), set()
    for is_stored, name, tier in steps:
        if is_stored:
            names.stored([name], [key(name)], tier)
            held.add((name, tier))
        else:
            names.removed([name], tier)
            held.discard((name, tier))
        there = sorted({name for name, _ in held})
        assert names.keys_of(range(6)) == [key(name) for name in there]
        assert len(names) == len(there)


def test_tenants_see_their_own_as_they_name_them() -> None:
    names = BlockNames()
    names.stored([1, 2], [b"aaaa1", b"bbbb2"], Tier.DRAM)
    assert names.keys_of([2, 1, 3], b"aaaa") == [b"1"]
    assert names.keys_of([2, 1, 3]) == [b"bbbb2", b"aaaa1"]
