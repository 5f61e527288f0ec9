"""The breaker, against the clock it is given."""

from router.breaker import Breaker, BreakerConfig

CONFIG = BreakerConfig(failure_threshold=3, success_threshold=2, window_ms=10_000, open_ms=5_000)


def test_it_opens_at_the_threshold_within_the_window() -> None:
    breaker = Breaker(CONFIG)
    for now in (0.0, 4.0, 10.0):
        assert breaker.admits(now, in_flight=7)
        breaker.failed(now)
    assert not breaker.admits(14.9, in_flight=0)


def test_failures_that_are_too_far_apart_do_not_open_it() -> None:
    breaker = Breaker(CONFIG)
    for now in (0.0, 5.1, 10.2, 15.3, 20.4):
        breaker.failed(now)
        assert breaker.is_closed


def test_after_a_while_one_request_at_a_time_may_try() -> None:
    breaker = Breaker(CONFIG)
    for _ in range(3):
        breaker.failed(0.0)
    assert breaker.admits(5.0, in_flight=0)
    assert not breaker.admits(5.0, in_flight=1)


def test_successes_in_a_row_close_it_and_forget_the_failures() -> None:
    breaker = Breaker(CONFIG)
    for _ in range(3):
        breaker.failed(0.0)
    breaker.succeeded()
    assert not breaker.is_closed
    breaker.succeeded()
    assert breaker.is_closed
    breaker.failed(6.0)
    breaker.failed(6.0)
    assert breaker.is_closed


def test_a_failed_try_opens_it_again_and_successes_count_anew() -> None:
    breaker = Breaker(CONFIG)
    for _ in range(3):
        breaker.failed(0.0)
    breaker.succeeded()
    breaker.failed(6.0)
    assert not breaker.admits(10.9, in_flight=0)
    assert breaker.admits(11.0, in_flight=0)
    breaker.succeeded()
    assert not breaker.is_closed


def test_it_can_be_turned_off() -> None:
    breaker = Breaker(BreakerConfig(enabled=False, failure_threshold=1))
    breaker.failed(0.0)
    assert breaker.admits(0.0, in_flight=99)
