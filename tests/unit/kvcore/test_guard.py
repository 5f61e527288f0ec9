"""An engine's step goes on whatever a plugin of ours does."""

import logging
from collections import Counter

import pytest

from kvcore import metrics
from kvcore.guard import Guard


def fail() -> int:
    raise RuntimeError("boom")


def make_guard() -> tuple[Guard, Counter[str]]:
    counts: Counter[str] = Counter()

    def count(name: str) -> None:
        counts[name] += 1

    return Guard(logging.getLogger("guard"), count), counts


def test_an_error_becomes_the_default_a_counter_and_one_log_line(caplog: pytest.LogCaptureFixture) -> None:
    guard, counts = make_guard()
    with caplog.at_level(logging.ERROR):
        assert [guard.call(7, fail) for _ in range(5)] == [7] * 5
    assert counts == {metrics.HOOK_ERRORS_TOTAL: 5}
    assert len(caplog.records) == 1
    assert "fail" in caplog.text
    assert "boom" in caplog.text


def test_an_error_elsewhere_is_logged_too(caplog: pytest.LogCaptureFixture) -> None:
    guard, _ = make_guard()
    for place in ("here", "there", "here"):
        guard.report(place, RuntimeError(place))
    assert len(caplog.records) == 2


def test_what_works_is_passed_through() -> None:
    guard, _ = make_guard()
    assert guard.call(0, lambda x, y: x + y, 2, y=3) == 5
