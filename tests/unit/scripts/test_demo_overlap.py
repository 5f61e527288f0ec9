"""The demo's claim that layers overlap, from trace files written by hand."""

import json
from pathlib import Path

import pytest
from demo_lib import overlap


def write_trace(path: Path, event: str, *rows: tuple[str, int, int]) -> Path:
    lines = [
        json.dumps({"event": event, "block": block, "layer": layer, "ns": ns}) for block, layer, ns in rows
    ]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


@pytest.mark.parametrize(
    ("layer_0_loaded_ns", "num_overlapping", "lead_ms"),
    [(5_000_000, 1, 4.0), (9_000_000, 0, 0.0), (12_000_000, 0, -3.0)],
)
def test_lead_is_from_first_layer_loaded_to_last_layer_committed(
    tmp_path: Path, layer_0_loaded_ns: int, num_overlapping: int, lead_ms: float
) -> None:
    saved = write_trace(tmp_path / "saved", "save_layer_committed", ("a", 0, 1_000_000), ("a", 1, 9_000_000))
    loaded = write_trace(
        tmp_path / "loaded", "load_layer_done", ("a", 0, layer_0_loaded_ns), ("a", 1, 13_000_000)
    )
    seen = overlap.measure(saved, loaded, layers_read_before_seal=7)
    assert seen == overlap.Overlap(1, num_overlapping, lead_ms, 7)
    assert ("none seen" in seen.sentence()) == (num_overlapping == 0)


def test_blocks_of_other_engines_do_not_count(tmp_path: Path) -> None:
    saved = write_trace(tmp_path / "saved", "save_layer_committed", ("a", 0, 9))
    loaded = write_trace(tmp_path / "loaded", "load_layer_done", ("b", 0, 1))
    assert overlap.measure(saved, loaded, 0) == overlap.Overlap(0, 0, None, 0)


def test_missing_traces_are_no_overlap(tmp_path: Path) -> None:
    seen = overlap.measure(tmp_path / "none", tmp_path / "neither", 0)
    assert seen.num_overlapping == 0
    assert "none seen" in seen.sentence()
