from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from router.core.demand import Demand, anchor_depths


def test_anchors_are_dense_at_first_and_few_in_all() -> None:
    assert list(anchor_depths(12)) == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12]
    assert list(anchor_depths(0)) == []
    assert len(list(anchor_depths(8192))) < 45


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), max_size=30))
def test_counts_are_those_of_all_prompts_before(prompts: list[tuple[int, int]]) -> None:
    demand, naive = Demand(), Counter[int]()
    for document, length in prompts:
        hashes = [document * 1000 + depth for depth in range(length)]
        anchors = list(anchor_depths(length))
        assert demand.observe(hashes) == [(depth, naive[hashes[depth - 1]]) for depth in anchors]
        naive.update(hashes[depth - 1] for depth in anchors)


def test_memory_is_bounded_and_what_is_asked_for_stays() -> None:
    demand = Demand(max_anchors=10)
    for document in range(100):
        demand.observe([7, 8])
        demand.observe([1000 + 10 * document, 1001 + 10 * document])
        assert len(demand) <= 10
    assert demand.observe([7, 8]) == [(1, 100), (2, 100)]
    assert demand.observe([1000, 1001]) == [(1, 0), (2, 0)]


def test_a_request_that_comes_again_is_one_request() -> None:
    demand = Demand()
    assert demand.observe([1, 2]) == [(1, 0), (2, 0)]
    assert demand.observe([1, 2], is_again=True) == [(1, 0), (2, 0)]
    assert demand.observe([1, 3]) == [(1, 1), (2, 0)]
    assert demand.observe([1, 2], is_again=True) == [(1, 1), (2, 0)]
