"""Quotas of tenants on a level below DRAM: who leaves for whom."""

from hypothesis import given
from hypothesis import strategies as st

from store_server.core.owners import tenant_prefix
from store_server.level_quotas import LevelQuotas, QuotaUse

A, B = tenant_prefix("a"), tenant_prefix("b")


def test_they_push_out_the_oldest() -> None:
    quotas = LevelQuotas({A: 100, B: 0})
    assert not quotas.fits(A + b"1", 101) and quotas.fits(B + b"1", 101) and quotas.fits(b"other", 101)
    assert quotas.add(A + b"1", 60) == [] and quotas.add(A + b"2", 40) == []
    assert quotas.add(B + b"1", 1000) == []
    assert quotas.add(A + b"3", 50) == [A + b"1"]
    assert quotas.use_of(A) == QuotaUse(2, 90, 100) and quotas.use_of(B) is None
    quotas.touch(A + b"2")
    assert quotas.add(A + b"4", 20) == [A + b"3"], "what was asked for stays longer"
    assert quotas.add(A + b"3", 50) == [A + b"2"]
    quotas.forget([A + b"4", A + b"unknown", b"x"])
    assert quotas.use_of(A) == QuotaUse(1, 50, 100)
    assert quotas.add(A + b"3", 70) == [], "it replaces itself"


def test_what_lies_there_counts_and_leaves_only_for_something_new() -> None:
    quotas = LevelQuotas({A: 100})
    for number in range(5):
        quotas.note(A + bytes([number]), 40)
    assert quotas.use_of(A) == QuotaUse(5, 200, 100)
    assert not quotas.has_room(A + b"x", 1) and quotas.has_room(B + b"x", 1 << 40)
    assert quotas.add(A + b"new", 30) == [A + bytes([number]) for number in range(4)]
    assert quotas.has_room(A + b"x", 30) and not quotas.has_room(A + b"x", 31)


STEPS = st.lists(
    st.tuples(st.sampled_from(("add", "note", "forget", "touch")), st.integers(0, 12), st.integers(1, 300)),
    max_size=60,
)


@given(STEPS)
def test_they_do_what_a_list_in_order_of_use_would(steps: list[tuple[str, int, int]]) -> None:
    quotas = LevelQuotas({A: 1000})
    model: list[tuple[bytes, int]] = []
    for step, number, size_bytes in steps:
        one = A + bytes([number])
        held = dict(model)
        if step == "touch" and one in held:
            model = [entry for entry in model if entry[0] != one] + [(one, held[one])]
        elif step != "touch":
            model = [entry for entry in model if entry[0] != one]
        if step in ("add", "note"):
            model.append((one, size_bytes))
        if step == "add":
            expected = []
            while sum(size for _, size in model) > 1000:
                expected.append(model.pop(0)[0])
            assert quotas.add(one, size_bytes) == expected
        elif step == "note":
            quotas.note(one, size_bytes)
        elif step == "forget":
            quotas.forget([one, B + b"x"])
        else:
            quotas.touch(one)
        assert quotas.use_of(A) == QuotaUse(len(model), sum(size for _, size in model), 1000)
