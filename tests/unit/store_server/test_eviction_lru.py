from hypothesis import given
from hypothesis import strategies as st

from store_server.core.eviction.lru import LruPolicy
from tests.contracts.eviction_contract import Entry, EvictionContract, anything, evict


class TestLruContract(EvictionContract):
    policy_name = "lru"


def test_the_least_recently_used_goes_first() -> None:
    policy = LruPolicy()
    for key in (b"a", b"b", b"c"):
        policy.on_insert(Entry(key))
    policy.on_access([b"a", b"b"])
    assert [evict(policy) for _ in range(3)] == [b"c", b"a", b"b"]


def test_a_protected_object_does_not_hide_those_behind_it() -> None:
    policy = LruPolicy()
    for key in (b"leased", b"free"):
        policy.on_insert(Entry(key))
    victim = policy.victim(lambda entry: entry.key != b"leased")
    assert victim is not None and victim.key == b"free"


@given(st.lists(st.tuples(st.sampled_from("iarv"), st.integers(0, 12))))
def test_it_is_a_list_kept_in_order_of_use(history: list[tuple[str, int]]) -> None:
    policy, by_use = LruPolicy(), list[bytes]()
    for action, number in history:
        key = b"%d" % number
        if action == "i" and key not in by_use:
            policy.on_insert(Entry(key))
            by_use.append(key)
        elif action == "a":
            policy.on_access([key])
            if key in by_use:
                by_use.remove(key)
                by_use.append(key)
        elif action == "r":
            policy.on_remove(key)
            by_use = [other for other in by_use if other != key]
        elif action == "v":
            victim = policy.victim(anything)
            assert (victim.key if victim else None) == (by_use[0] if by_use else None)
