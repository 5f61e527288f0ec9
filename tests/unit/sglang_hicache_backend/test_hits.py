"""Which prefixes can be brought back when some pages of some pools are missing."""

from hypothesis import given
from hypothesis import strategies as st

from sglang_hicache_backend.hits import ALL_PAGES, TRAILING_PAGES, PoolPages, restorable_prefixes


def naive(num_kv: int, pools: list[PoolPages]) -> list[int]:
    """Straight from SGLang's description of the two policies."""

    def serves(pool: PoolPages, length: int) -> bool:
        if pool.policy == ALL_PAGES:
            return all(pool.present[:length])
        return all(pool.present[max(0, length - max(1, pool.num_trailing)) : length])

    return [length for length in range(1, num_kv + 1) if all(serves(pool, length) for pool in pools)]


@given(st.data())
def test_as_the_naive_reading(data: st.DataObject) -> None:
    num_kv = data.draw(st.integers(0, 12))
    pools = [
        PoolPages(
            name,
            data.draw(st.sampled_from([ALL_PAGES, TRAILING_PAGES])),
            data.draw(st.integers(0, 5)),
            data.draw(st.lists(st.booleans(), min_size=num_kv, max_size=num_kv)),
        )
        for name in data.draw(st.sampled_from([[], ["swa"], ["swa", "mamba"], ["indexer", "mamba"]]))
    ]
    found = restorable_prefixes(num_kv, pools)
    expected = naive(num_kv, pools)
    assert found.lengths == expected
    assert found.num_pages == max(expected, default=0)
    for pool in pools:
        assert found.by_pool.get(pool.name, 0) == max(naive(num_kv, [pool]), default=0)


def test_a_state_is_there_only_at_some_lengths() -> None:
    state = PoolPages("mamba", TRAILING_PAGES, 1, [False, True, False, True, False])
    found = restorable_prefixes(5, [state])
    assert found.lengths == [2, 4]
    assert found.by_pool == {"kv": 5, "mamba": 4}


def test_a_window_of_three_pages_needs_all_three_but_at_the_beginning() -> None:
    window = PoolPages("swa", TRAILING_PAGES, 3, [True, True, False, True, True, True])
    assert restorable_prefixes(6, [window]).lengths == [1, 2, 6]


def test_an_indexer_serves_up_to_its_first_gap() -> None:
    indexer = PoolPages("indexer", ALL_PAGES, 0, [True, True, False, True])
    assert restorable_prefixes(4, [indexer]).lengths == [1, 2]


def test_without_kv_there_is_nothing() -> None:
    assert restorable_prefixes(0, [PoolPages("swa", TRAILING_PAGES, 1, [])]) == (0, {}, [])
