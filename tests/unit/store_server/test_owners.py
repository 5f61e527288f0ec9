"""Tenants in the core: quotas, whose objects go, and that nobody reaches another's."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.errors import RequestRefused
from kvcore.wire import messages as m
from kvcore.wire.messages import Commit, ListKeys, Pin, PinKind, Read, Reserve, Stats, Status
from store_server.core.eviction import POLICIES, EvictionPolicy
from store_server.core.owners import OPERATOR, Owners, PolicyByOwner, Quota, tenant_prefix
from store_server.core.store import Store, StoreLimits
from store_server.tenants import scoped
from tests.contracts.eviction_contract import EvictionContract
from tests.unit.store_server.fake_cold import FakeCold
from tests.unit.store_server.model import KIB, check_invariants, key, put, remove

MIB = 1 << 20
A, B = tenant_prefix("a"), tenant_prefix("b")
ROOM_KIB = 512


def new_store(cold: FakeCold | None = None) -> Store:
    limits = StoreLimits(pool_size_bytes=2 * MIB, slab_bytes=64 * KIB, high_watermark=1.0, low_watermark=1.0)
    return Store(limits, cold, quotas=[Quota(prefix=A, dram_bytes=ROOM_KIB * KIB), Quota(prefix=B)])


def own(prefix: bytes, *numbers: int) -> list[bytes]:
    return [prefix + key(number) for number in numbers]


def put_each(store: Store, keys: list[bytes], size_bytes: int = 32 * KIB) -> list[Status]:
    return [put(store, store.open_session(), [one], size_bytes)[0] for one in keys]


class TestPolicyByOwnerContract(EvictionContract):
    def new_policy(self) -> EvictionPolicy:
        return PolicyByOwner(POLICIES["lru"], Owners([Quota(prefix=A)], MIB))


def test_a_tenant_over_its_quota_pushes_out_its_own_oldest() -> None:
    store = new_store()
    assert store.owners is not None
    put_each(store, own(B, *range(10)))
    assert put_each(store, own(A, *range(40))) == [Status.OK] * 40
    held = set(store.catalog.by_key)
    assert set(own(B, *range(10))) <= held
    assert own(A, 39)[0] in held and own(A, 0)[0] not in held
    assert store.owners.used_bytes(A) <= ROOM_KIB * KIB < store.owners.used_bytes(A) + 40 * KIB
    check_invariants(store)


def test_what_could_never_fit_its_quota_is_too_large() -> None:
    store = new_store()
    assert put_each(store, own(A, 1), ROOM_KIB * KIB) == [Status.TOO_LARGE]
    assert put_each(store, own(B, 1), ROOM_KIB * KIB) == [Status.OK]


def test_in_a_full_pool_whoever_uses_most_of_its_quota_gives() -> None:
    store = new_store()
    put_each(store, own(A, *range(4)))  # a quarter of its quota
    put_each(store, own(B, *range(80)))  # more than there is
    held = set(store.catalog.by_key)
    assert set(own(A, *range(4))) <= held and own(B, 79)[0] in held and own(B, 0)[0] not in held


def test_a_pinned_tenant_is_full_and_nobody_else_suffers() -> None:
    store = new_store()
    keys = own(A, *range(8))
    put_each(store, keys)
    store.upkeep.pin(Pin(1, keys, PinKind.HARD), 0.0)
    put_each(store, own(A, *range(8, 15)))
    more = put_each(store, own(A, *range(20, 60)))
    assert set(more) == {Status.OK}, "what is not pinned makes room"
    store.upkeep.pin(Pin(1, [one for one in store.catalog.by_key if one.startswith(A)], PinKind.HARD), 0.0)
    assert put_each(store, own(A, 99)) == [Status.FULL]
    assert put_each(store, own(B, 99)) == [Status.OK]


def test_with_an_ssd_a_quota_spills_and_writers_wait_for_it() -> None:
    cold = FakeCold()
    store = new_store(cold)
    keys = own(A, *range(40))
    session = store.open_session()
    for one in keys:
        request = Reserve(1, [one], [32 * KIB])
        while store.writes.reserve(session, request, 0.0, may_wait=True) is None:
            assert cold.writing, "there is something to wait for"
            cold.finish_writes(store)
        store.writes.commit(session, Commit(2, [one], 0, 1), 0.0)
    assert all(one in store.catalog.by_key or one in cold.stored for one in keys), "nothing is lost"
    check_invariants(store)


def test_evicting_for_a_tenant_leaves_others_alone() -> None:
    store = new_store()
    put_each(store, [*own(A, *range(5)), *own(B, *range(5)), *own(OPERATOR, 1)])
    assert store.space.evict_some_of(A, 3, 2 * MIB) == (3, 96 * KIB, False)
    assert store.space.evict_some_of(A, 3, 2 * MIB) == (2, 64 * KIB, True)
    assert len(store.catalog.by_key) == 6


def test_listings_show_own_keys_by_their_own_names() -> None:
    store = new_store()
    put_each(store, [*own(A, 1, 2, 3), *own(B, 9), *own(OPERATOR, 7)])
    page = store.upkeep.list_keys(ListKeys(1, 0, 2), A)
    rest = store.upkeep.list_keys(ListKeys(1, page.next_cursor, 2), A)
    assert [info.key for info in (*page.keys, *rest.keys)] == [key(1), key(2), key(3)]
    other = store.upkeep.list_keys(ListKeys(1, 0, 2), A)
    with pytest.raises(RequestRefused, match="this listing is over"):
        store.upkeep.list_keys(ListKeys(1, other.next_cursor, 2), B)
    everything = store.upkeep.list_keys(ListKeys(1))
    assert len(everything.keys) == 5


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30), st.sampled_from([A, B, OPERATOR])), max_size=60))
def test_accounts_agree_with_what_is_there(steps: list[tuple[bool, int, bytes]]) -> None:
    store = new_store()
    owners = store.owners
    assert owners is not None
    for is_put, number, owner in steps:
        if is_put:
            put(store, store.open_session(), own(owner, number), 100 * KIB)
        else:
            remove(store, own(owner, number), force=True)
        for one in (A, B, OPERATOR):
            objects = [obj for obj in store.catalog.by_key.values() if owners.owner_of(obj.key) == one]
            assert owners.num_objects(one) == len(objects)
            assert owners.used_bytes(one) == sum(store.space._cost_bytes(obj) for obj in objects)
            assert owners.used_bytes(one) <= owners.limit_bytes(one)


def test_requests_are_scoped_whatever_keys_they_name() -> None:
    request = Reserve(1, [b"x", A + b"y"], [8], 1, [b"", b"x"])
    assert scoped(request, B) == Reserve(1, [B + b"x", B + A + b"y"], [8], 1, [b"", B + b"x"])
    assert scoped(Read(1, [b"x"], wait_ms=5), B) == Read(1, [B + b"x"], wait_ms=5)
    assert scoped(request, OPERATOR) is request
    stats = Stats(1)
    assert scoped(stats, B) is stats


def test_every_request_with_keys_is_scoped() -> None:
    for kind in m.Request.__args__:  # type: ignore[attr-defined]
        named = {"keys", "parents"} & set(kind.__struct_fields__)
        assert named <= ({"keys", "parents"} if kind in (m.Reserve, m.CopyFrom) else {"keys"}), kind
