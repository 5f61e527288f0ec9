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


def add(pool: EndpointPool[Endpoint], endpoint: Endpoint) -> Endpoint | None:
    """The victim, if there had to be one."""
    fits, victim = pool.reserve(endpoint.key)
    assert fits
    pool.add(endpoint)
    return victim


def test_what_was_not_used_makes_room() -> None:
    pool: EndpointPool[Endpoint] = EndpointPool(3)
    for number in range(3):
        assert add(pool, Endpoint(key_of(number))) is None
    assert pool.use(key_of(0)) is pool.get(key_of(0)) is not None and pool.get(key_of(7)) is None
    assert pool.get(key_of(1)) is not None, "to look is not to use"
    victim = add(pool, Endpoint(key_of(3)))
    assert victim is not None and victim.key == key_of(1)
    assert [endpoint.key for endpoint in pool] == [key_of(0), key_of(2), key_of(3)]


def test_what_is_busy_or_being_made_stays() -> None:
    pool: EndpointPool[Endpoint] = EndpointPool(2)
    first = Endpoint(key_of(0), is_busy=True)
    add(pool, first)
    assert pool.reserve(key_of(1)) == (True, None)
    assert pool.reserve(key_of(2)) == pool.reserve(key_of(1)) == pool.reserve(key_of(0)) == (False, None)
    with pytest.raises(LookupError):
        pool.add(Endpoint(key_of(2)))
    pool.release(key_of(1))
    assert pool.reserve(key_of(2)) == (True, None)
    first.is_busy = False
    assert pool.reserve(key_of(3)) == (True, first)


def test_there_is_room_for_at_least_one() -> None:
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
            assert pool.use(key) is there.get(key)
        elif what == "r":
            assert pool.remove(key) is there.pop(key, None)
        elif what == "b" and key in there:
            there[key].is_busy = not there[key].is_busy
        elif what == "a" and key not in there:
            fits, victim = pool.reserve(key)
            assert fits is (len(there) < capacity or any(not item.is_busy for item in there.values()))
            if victim is not None:
                assert not victim.is_busy and len(there) == capacity
                del there[victim.key]
            if fits:
                there[key] = Endpoint(key)
                pool.add(there[key])
        assert {endpoint.key for endpoint in pool} == set(there) and len(pool) == len(there) <= capacity
