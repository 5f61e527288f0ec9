"""What the store says about where things are, as it happens."""

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.wire.messages import Commit, Evict, Put, Remove, Reserve, Tier
from store_server.core.placements import Placed, PlacementLog
from store_server.core.store import Store, StoreLimits

MIB = 1 << 20


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def put(store: Store, numbers: list[int], size_bytes: int = 1000) -> None:
    session = store.open_session()
    request = Put(1, [key(n) for n in numbers], [size_bytes] * len(numbers))
    incoming = store.writes.put_begin(session, request, 0.0)
    assert incoming is not None
    store.writes.received(session, incoming, (), 0.0)


@pytest.fixture
def log() -> PlacementLog:
    return PlacementLog()


@pytest.fixture
def store(log: PlacementLog) -> Store:
    return Store(StoreLimits(pool_size_bytes=MIB), placements=log)


def test_neighbours_of_one_kind_are_one_run(log: PlacementLog) -> None:
    log.stored([b"a"], Tier.DRAM)
    log.stored([b"b"], Tier.DRAM)
    log.stored([b"c"], Tier.SSD)
    log.removed([], Tier.SSD)
    log.removed([b"a"], Tier.DRAM)
    assert [(run.is_stored, run.tier, run.keys) for run in log.take()] == [
        (True, Tier.DRAM, [b"a", b"b"]),
        (True, Tier.SSD, [b"c"]),
        (False, Tier.DRAM, [b"a"]),
    ]
    assert log.take() == []


def test_only_what_is_complete_is_told(store: Store, log: PlacementLog) -> None:
    session = store.open_session()
    store.writes.reserve(session, Reserve(1, [key(1), key(2)], [1000], 2), 0.0)
    store.writes.commit(session, Commit(2, [key(1)], 0, 1), 0.0)
    assert not len(log)
    store.writes.commit(session, Commit(3, [key(1)], 1, 2), 0.0)
    store.close_session(session)  # key 2 is abandoned
    assert [(run.is_stored, run.keys) for run in log.take()] == [(True, [key(1)])]


def test_removal_and_eviction_are_told(store: Store, log: PlacementLog) -> None:
    put(store, [1, 2, 3])
    log.take()
    store.upkeep.remove(Remove(1, [key(2), key(9)]))
    store.space.evict_some(100, Evict(1).size_bytes or MIB)
    (run,) = log.take()
    assert not run.is_stored and sorted(run.keys) == [key(1), key(2), key(3)]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["put", "remove", "evict"]), st.lists(st.integers(0, 20), max_size=6)),
        max_size=30,
    )
)
def test_whoever_follows_the_log_knows_what_the_store_holds(steps: list[tuple[str, list[int]]]) -> None:
    log = PlacementLog()
    store = Store(StoreLimits(pool_size_bytes=MIB), placements=log)
    told: defaultdict[Tier, set[bytes]] = defaultdict(set)
    for action, numbers in steps:
        if action == "put":
            put(store, sorted(set(numbers)), 100_000)
        elif action == "remove":
            store.upkeep.remove(Remove(1, [key(n) for n in numbers]))
        else:
            store.space.evict_some(len(numbers), 400_000)
        for run in log.take():
            follow(told, run)
        held = {obj.key for obj in store.catalog.by_key.values() if obj.is_sealed}
        assert told[Tier.DRAM] == held


def follow(told: dict[Tier, set[bytes]], run: Placed) -> None:
    keys = set(run.keys)
    if run.is_stored:
        assert not keys & told[run.tier], "stored twice"
        told[run.tier] |= keys
    else:
        assert keys <= told[run.tier], "removed what was not there"
        told[run.tier] -= keys
