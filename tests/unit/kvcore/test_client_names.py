"""Many keys become runs that one message may carry; none is lost, doubled or put beside another's parent."""

from hypothesis import given
from hypothesis import strategies as st

from kvcore.client.names import key_runs, key_runs_with_parents

KEYS = st.lists(st.binary(min_size=32, max_size=32), max_size=40)


@given(KEYS, st.integers(1, 12))
def test_runs_are_the_keys_in_order(keys: list[bytes], max_keys: int) -> None:
    runs = list(key_runs(keys, max_keys))
    assert [key for run in runs for key in run] == keys
    assert all(len(run) == max_keys for run in runs[:-1]) and all(0 < len(run) <= max_keys for run in runs)


@given(KEYS, st.integers(1, 12))
def test_each_key_keeps_its_parent(keys: list[bytes], max_keys: int) -> None:
    parents = [bytes(reversed(key)) for key in keys]
    runs = list(key_runs_with_parents(keys, parents, max_keys))
    assert [run for run, _ in runs] == list(key_runs(keys, max_keys))
    assert [parent for _, run_parents in runs for parent in run_parents] == parents
    assert all(len(run) == len(run_parents) for run, run_parents in runs)


@given(KEYS, st.integers(1, 12))
def test_without_parents_there_are_none(keys: list[bytes], max_keys: int) -> None:
    runs = list(key_runs_with_parents(keys, (), max_keys))
    assert [run for run, _ in runs] == list(key_runs(keys, max_keys))
    assert not any(run_parents for _, run_parents in runs)
