"""The small parts that keep the engine safe and observable."""

import json
import logging
import threading
from pathlib import Path

import pytest

from kvcore import metrics
from mooncake_connector.counters import Counters
from mooncake_connector.guard import Guard
from mooncake_connector.tracing import LayerTrace


def fail() -> int:
    raise RuntimeError("boom")


def test_an_error_becomes_the_default_a_counter_and_one_log_line(caplog: pytest.LogCaptureFixture) -> None:
    counters = Counters()
    guard = Guard(logging.getLogger("guard"), counters)
    with caplog.at_level(logging.ERROR):
        assert [guard.call(7, fail) for _ in range(5)] == [7] * 5
    assert counters.take() == {metrics.HOOK_ERRORS_TOTAL: 5}
    assert len(caplog.records) == 1
    assert "fail" in caplog.text
    assert "boom" in caplog.text


def test_an_error_elsewhere_is_logged_too(caplog: pytest.LogCaptureFixture) -> None:
    guard = Guard(logging.getLogger("guard"), Counters())
    for place in ("here", "there", "here"):
        guard.report(place, RuntimeError(place))
    assert len(caplog.records) == 2


def test_what_works_is_passed_through() -> None:
    guard = Guard(logging.getLogger("guard"), Counters())
    assert guard.call(0, lambda x, y: x + y, 2, y=3) == 5


def test_counters_of_many_threads_add_up_and_are_taken_once() -> None:
    counters = Counters()

    def count() -> None:
        for _ in range(1000):
            counters.add("n")

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counters.add("zero", 0)
    assert counters.take() == {"n": 4000}
    assert counters.take() == {}


def test_trace_lines_are_whole_and_in_the_order_of_layers(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    traces = [LayerTrace(str(path)) for _ in range(2)]
    for trace in traces:
        trace.record("load_layer_done", "r", range(1, 3), b"\x01\x02")
        trace.close()
        trace.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["layer"] for line in lines] == [1, 2, 1, 2]
    assert lines[0]["block"] == "0102"
    assert lines[0]["ns"] <= lines[2]["ns"]


def test_without_a_path_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trace = LayerTrace("")
    trace.record("load_layer_done", "r", range(1), b"")
    trace.close()
    assert list(tmp_path.iterdir()) == []
