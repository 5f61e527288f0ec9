"""The endpoint pool against a list that is searched."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.transport.endpoints import EndpointKey, EndpointPool


@dataclass
class Endpoint:
    key: EndpointKey
    is_busy: bool = False


def key_of(number: int) -> EndpointKey:
    return EndpointKey(f"peer{number % 3}", f"card{number}", "card")


def test_what_was_not_used_makes_room() -> None:
    pool: EndpointPool[Endpoint] = EndpointPool(3)
    for number in range(3):
        assert pool.make_room() == (True, None)
        pool.add(Endpoint(key_of(number)))
    assert pool.get(key_of(0)) is not None and pool.get(key_of(7)) is None
    fits, victim = pool.make_room()
    assert fits and victim is not None and victim.key == key_of(1)
    pool.add(Endpoint(key_of(3)))
    assert [endpoint.key for endpoint in pool] == [key_of(0), key_of(2), key_of(3)]


def test_what_is_busy_stays() -> None:
    pool: EndpointPool[Endpoint] = EndpointPool(2)
    first, second = Endpoint(key_of(0), is_busy=True), Endpoint(key_of(1), is_busy=True)
    pool.add(first)
    pool.add(second)
    assert pool.make_room() == (False, None)
    with pytest.raises(LookupError):
        pool.add(Endpoint(key_of(2)))
    second.is_busy = False
    assert pool.make_room() == (True, second)


def test_a_key_is_there_once() -> None:
    pool: EndpointPool[Endpoint] = EndpointPool(2)
    pool.add(Endpoint(key_of(0)))
    with pytest.raises(LookupError):
        pool.add(Endpoint(key_of(0)))
    with pytest.raises(ValueError):
        EndpointPool(0)


@given(
    capacity=st.integers(1, 4),
    history=st.lists(st.tuples(st.sampled_from("uarb"), st.integers(0, 7)), max_size=60),
)
def test_the_cap_holds_and_nothing_is_lost(capacity: int, history: list[tuple[str, int]]) -> None:
    pool: EndpointPool[Endpoint] = EndpointPool(capacity)
    there: dict[EndpointKey, Endpoint] = {}
    for what, number in history:
        key = key_of(number)
        if what == "u":
            assert pool.get(key) is there.get(key)
        elif what == "r":
            assert pool.remove(key) is there.pop(key, None)
        elif what == "b" and key in there:
            there[key].is_busy = not there[key].is_busy
        elif what == "a" and key not in there:
            fits, victim = pool.make_room()
            assert fits is (len(there) < capacity or any(not item.is_busy for item in there.values()))
            if victim is not None:
                assert not victim.is_busy and len(there) == capacity
                del there[victim.key]
            if fits:
                there[key] = Endpoint(key)
                pool.add(there[key])
        assert {endpoint.key for endpoint in pool} == set(there) and len(pool) <= capacity
        assert {endpoint.key for endpoint in pool.of_peer("peer1")} == {k for k in there if k.peer == "peer1"}
