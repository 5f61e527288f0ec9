"""The small parts that make the plugin observable."""

import json
import threading
from pathlib import Path

import pytest

from mooncake_connector.counters import Counters
from mooncake_connector.tracing import LayerTrace


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
