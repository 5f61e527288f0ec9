from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.forecast import Forecast
from router.core.length_history import NUM_BUCKETS, LengthHistory, bucket_of


def forecast(history: LengthHistory | None = None) -> Forecast:
    return Forecast(history or LengthHistory(100))


def test_a_request_counts_from_its_prefills_end_for_t_d() -> None:
    load = forecast()
    load.add("a", start_at=10.0, kv_tokens=500, output_tokens=100, tbt_ms=20)
    answers = [load.uniform_load_at(at, decode_ms=3000) for at in (9.9, 10.0, 12.9, 13.0)]
    assert answers == [(0, 0), (1, 500), (1, 500), (0, 0)]


def test_the_measured_start_replaces_the_predicted_one() -> None:
    load = forecast()
    load.add("a", 10.0, 500, 100, 20)
    load.started("a", 12.0)
    assert load.uniform_load_at(11.0, 3000) == (0, 0)
    assert load.uniform_load_at(14.0, 3000) == (1, 500)


def test_request_level_uses_the_expected_length() -> None:
    load = forecast()
    load.add("short", 10.0, 500, 50, 20)  # 1 s
    load.add("long", 10.0, 300, 500, 20)  # 10 s
    assert load.expected_load_at(10.5, now=9.0) == (2, 800)
    assert load.expected_load_at(11.5, now=9.0) == (1, 300)


def test_an_overdue_request_is_expected_to_last_as_such_requests_do() -> None:
    history = LengthHistory(100)
    for _ in range(200):
        history.observe("t", 100, 100)
        history.observe("t", 100, 1000)
    load = forecast(history)
    load.add("a", 0.0, 500, output_tokens=100, tbt_ms=10)  # due at 1 s; 300 tokens by now
    assert load.expected_load_at(3.1, now=3.0) == (1, 500)
    assert load.expected_load_at(9.0, now=3.0) == (1, 500)  # some 600 tokens are still to come
    assert load.expected_load_at(12.0, now=3.0) == (0, 0)


def test_t_d_follows_what_is_measured() -> None:
    load = Forecast(LengthHistory(100), unknown_decode_ms=10_000)
    for n in range(400):
        load.add(f"r{n}", 0.0, 1, 1, 1)
        load.started(f"r{n}", 5.0)
        load.finished(f"r{n}", 7.0)
    assert load.mean_decode_ms == pytest.approx(2000, rel=0.01)
    assert len(load) == 0


def test_cancelled_requests_teach_nothing_and_leave() -> None:
    load = forecast()
    before = load.mean_decode_ms
    load.add("a", 0.0, 1, 1, 1)
    load.remove("a")
    load.remove("a")
    load.finished("a", 99.0)
    load.started("a", 1.0)
    assert load.mean_decode_ms == before
    assert load.uniform_load_at(0.0, 1e9) == (0, 0)


request = st.tuples(st.floats(0, 20), st.integers(0, 1000), st.integers(0, 500), st.booleans())


@settings(max_examples=100, deadline=None)
@given(st.lists(request, max_size=200), st.floats(0, 40), st.floats(0, 10_000))
def test_against_a_plain_list(
    requests: list[tuple[float, int, int, bool]], at: float, decode_ms: float
) -> None:
    load = forecast()
    expected = []
    for number, (start_at, kv_tokens, output_tokens, is_removed) in enumerate(requests):
        load.add(str(number), start_at, kv_tokens, output_tokens, 20.0)
        if is_removed:
            load.remove(str(number))
        else:
            expected.append((start_at, kv_tokens, output_tokens))
    assert len(load) == len(expected)
    active = [kv for start, kv, _ in expected if start <= at and start + decode_ms / 1e3 > at]
    assert load.uniform_load_at(at, decode_ms) == (len(active), sum(active))
    active = [kv for start, kv, out in expected if start <= at and start + out * 20.0 / 1e3 > at]
    assert load.expected_load_at(at, now=-1.0) == (len(active), sum(active))


def test_lengths_are_expected_by_kind_then_tenant_then_everybody() -> None:
    history = LengthHistory(unknown_tokens=77)
    assert history.expected_tokens("chat", 1000, 0) == 77
    assert history.expected_tokens("chat", 1000, 50) == 50
    for _ in range(30):
        history.observe("chat", 1000, 40)
        history.observe("chat", 30_000, 400)
        history.observe("batch", 1000, 4000)
    assert history.expected_tokens("chat", 1000, 0) == pytest.approx(40)
    assert history.expected_tokens("chat", 30_000, 0) == pytest.approx(400)
    assert 40 < history.expected_tokens("chat", 5, 0) < 400
    assert 400 < history.expected_tokens("new", 1000, 0) < 4000
    assert history.expected_tokens("batch", 1000, 100) == pytest.approx(100)


def test_expectations_follow_a_change() -> None:
    history = LengthHistory(100)
    for _ in range(2000):
        history.observe("t", 10, 50)
    for _ in range(2000):
        history.observe("t", 10, 800)
    assert history.expected_tokens("t", 10, 0) == pytest.approx(800, rel=0.05)


def test_many_samples_do_not_overflow() -> None:
    history = LengthHistory(100)
    for _ in range(30_000):
        history.observe("t", 10, 64)
    assert history.expected_tokens("t", 10, 0) == pytest.approx(64)
    assert history.expected_tokens("t", 10, 32) == pytest.approx(32)
    history.observe("t", 10, 640_000)
    assert history.expected_tokens("t", 10, 0) == pytest.approx(64 + 640_000 / 512, rel=0.05)


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=50), st.integers(1, 6000))
def test_the_mean_under_a_limit_is_never_off_by_more_than_a_bucket(lengths: list[int], limit: int) -> None:
    history = LengthHistory(100)
    for length in lengths:
        history.observe("t", 10, length)
    capped = [min(length, limit) for length in lengths]
    ratio = history.expected_tokens("other", 10, limit) / (sum(capped) / len(capped))
    assert 0.7 < ratio < 1.42 * (513 / 512) ** 50


def test_what_remains_grows_where_lengths_are_two_kinds() -> None:
    history = LengthHistory(100)
    for _ in range(100):
        history.observe("t", 10, 10)
        history.observe("t", 10, 1000)
    remaining = history.remaining_tokens()
    assert remaining[bucket_of(1)] < 600
    assert remaining[bucket_of(64)] > 900
    assert (remaining[1:] > 0).all()
    assert len(remaining) == NUM_BUCKETS


def test_memory_is_bounded_by_the_number_of_kinds() -> None:
    history = LengthHistory(100)
    for n in range(6000):
        history.observe(f"tenant-{n}", 10, 5)
    assert history.num_kinds <= 4096
    history.observe("t", 10, 0)  # an empty answer is no sample
    assert history.expected_tokens("t", 10, 0) == pytest.approx(5)


@given(st.integers(0, 1 << 22))
def test_every_length_has_a_bucket(tokens: int) -> None:
    assert 0 <= bucket_of(tokens) < NUM_BUCKETS
