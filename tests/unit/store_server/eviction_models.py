"""Runs a policy and a naive model of it through the same history and compares every victim."""

from collections.abc import Callable
from typing import Protocol

from hypothesis import strategies as st

from store_server.core.eviction import EvictionPolicy
from tests.contracts.eviction_contract import Entry

KEYS = [b"%d" % number for number in range(12)]


class NaiveModel(Protocol):
    """Plain lists and full scans: slow, and easy to believe."""

    def insert(self, key: bytes, parent: bytes | None, size_bytes: int) -> None: ...
    def access(self, key: bytes) -> None: ...
    def remove(self, key: bytes, evicted: bool) -> None: ...
    def victim(self, evictable: Callable[[bytes], bool]) -> bytes | None: ...


Step = tuple[str, int, int]

# Block n has block n // 2 as its parent, so that there are chains with branches.
histories = st.lists(
    st.tuples(
        st.sampled_from(["insert", "access", "access", "remove", "lose", "evict", "evict", "peek"]),
        st.integers(0, 11),
        st.integers(0, 11),
    ),
    max_size=80,
)


def parent_of(number: int) -> bytes | None:
    return KEYS[number // 2] if number > 1 else None


def follow(policy: EvictionPolicy, naive: NaiveModel, history: list[Step], *, parents: bool = False) -> None:
    """`peek` asks for a victim while one key is protected; `evict` does the eviction; `lose` evicts a block
    whose turn it was not (its slab was needed)."""
    known: set[bytes] = set()
    for action, number, other in history:
        key = KEYS[number]
        if action == "insert" and key not in known:
            parent = parent_of(number) if parents else None
            policy.on_insert(Entry(key, other + 1), parent)
            naive.insert(key, parent, other + 1)
            known.add(key)
        elif action == "access":
            policy.on_access([key, KEYS[other]])
            for used in (key, KEYS[other]):
                if used in known:
                    naive.access(used)
        elif action in ("remove", "lose") and key in known:
            policy.on_remove(key, evicted=action == "lose")
            naive.remove(key, evicted=action == "lose")
            known.remove(key)
        elif action in ("evict", "peek"):
            is_evict = action == "evict"
            protected = None if is_evict else KEYS[other]
            victim = policy.victim(lambda entry, protected=protected: entry.key != protected)  # type: ignore[misc]
            expected = naive.victim(lambda key, protected=protected: key != protected)  # type: ignore[misc]
            assert (victim.key if victim else None) == expected
            if is_evict and victim is not None:
                policy.on_remove(victim.key, evicted=True)
                naive.remove(victim.key, evicted=True)
                known.remove(victim.key)
    assert len(policy) == len(known) and all(key in policy for key in known)
