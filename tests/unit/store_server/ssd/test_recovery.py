"""What a restart finds: with a snapshot, without, and with parts of the files damaged."""

import os
import shutil
from pathlib import Path

import pytest

from store_server.ssd.disk_io import DiskIo
from store_server.ssd.folder import Directory
from store_server.ssd.format import PAGE_BYTES
from tests.unit.store_server.ssd.harness import Driver, data_files, flip_byte, key_of, make_data


def fill(directory: Path, count: int = 60, size_bytes: int = 50_000) -> None:
    with Driver(directory) as driver:
        for number in range(count):
            driver.put(key_of(number), make_data(number, size_bytes), num_layers=3)


def expect(directory: Path, numbers: set[int], size_bytes: int = 50_000) -> None:
    with Driver(directory) as driver:
        assert set(driver.tier) == {key_of(number) for number in numbers}
        for number in numbers:
            assert driver.get(key_of(number)) == make_data(number, size_bytes)


def test_a_graceful_stop_leaves_a_snapshot_of_every_segment(tmp_path: Path) -> None:
    fill(tmp_path)
    assert len(data_files(tmp_path)) == len(list(tmp_path.glob("*.index"))) >= 3
    with Driver(tmp_path) as driver:
        assert driver.report is not None
        assert driver.report.num_objects == 60 and driver.report.num_segments_scanned == 0


def test_without_snapshots_the_headers_are_scanned_and_snapshots_written(tmp_path: Path) -> None:
    fill(tmp_path)
    for path in tmp_path.glob("*.index"):
        path.unlink()
    with Driver(tmp_path) as driver:
        assert driver.report is not None
        assert driver.report.num_segments_scanned == driver.report.num_segments >= 3
    with Driver(tmp_path) as driver:
        assert driver.report is not None and driver.report.num_segments_scanned == 0
    expect(tmp_path, set(range(60)))


@pytest.mark.parametrize("damage", ["flip", "truncate", "garbage", "other segment"])
def test_a_bad_snapshot_costs_a_scan_and_nothing_else(tmp_path: Path, damage: str) -> None:
    fill(tmp_path)
    first, second = sorted(tmp_path.glob("*.index"))[:2]
    if damage == "flip":
        flip_byte(first, first.stat().st_size // 2)
    elif damage == "truncate":
        os.truncate(first, first.stat().st_size - 1)
    elif damage == "garbage":
        first.write_bytes(b"not a snapshot")
    else:
        shutil.copy(second, first)
    with Driver(tmp_path) as driver:
        assert driver.report is not None and driver.report.num_segments_scanned == 1
    expect(tmp_path, set(range(60)))


def test_a_damaged_header_costs_its_batch_only(tmp_path: Path) -> None:
    fill(tmp_path, count=10)
    for path in tmp_path.glob("*.index"):
        path.unlink()
    # Each put was a batch of its own: one header page, then 13 pages of payload.
    flip_byte(data_files(tmp_path)[0], 3 * 14 * PAGE_BYTES + 20)
    expect(tmp_path, set(range(10)) - {3})


def test_a_torn_tail_is_ignored(tmp_path: Path) -> None:
    fill(tmp_path, count=10)
    for path in tmp_path.glob("*.index"):
        path.unlink()
    # The last batch's header is whole, its payload is not.
    os.truncate(data_files(tmp_path)[0], (9 * 14 + 5) * PAGE_BYTES)
    expect(tmp_path, set(range(9)))


def test_a_last_batch_with_wrong_payload_is_ignored(tmp_path: Path) -> None:
    fill(tmp_path, count=10)
    for path in tmp_path.glob("*.index"):
        path.unlink()
    flip_byte(data_files(tmp_path)[0], (9 * 14 + 5) * PAGE_BYTES)
    expect(tmp_path, set(range(9)))


def test_zeros_after_the_last_batch_are_no_objects(tmp_path: Path) -> None:
    fill(tmp_path, count=10)
    for path in tmp_path.glob("*.index"):
        path.unlink()
    os.truncate(data_files(tmp_path)[0], 1 << 20)
    expect(tmp_path, set(range(10)))
    assert data_files(tmp_path)[0].stat().st_size == 10 * 14 * PAGE_BYTES


def test_a_payload_that_looks_like_a_segment_adds_no_objects(tmp_path: Path) -> None:
    """A stored copy of a segment file must not be taken for headers when a real header is damaged."""
    fill(tmp_path / "source", count=3)
    (inner,) = data_files(tmp_path / "source")
    with Driver(tmp_path / "outer") as driver:
        driver.put(b"first", b"f" * 5000)
        driver.put(b"copy", inner.read_bytes())
        driver.put(b"last", b"l" * 5000)
    (outer,) = data_files(tmp_path / "outer")
    for path in (tmp_path / "outer").glob("*.index"):
        path.unlink()
    flip_byte(outer, 3 * PAGE_BYTES + 1)  # the header of the batch with the copy
    with Driver(tmp_path / "outer") as driver:
        assert set(driver.tier) == {b"first", b"last"}


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    note = tmp_path / "README"
    note.write_text("mine")
    (tmp_path / "segment-x.kv").write_text("mine too")
    fill(tmp_path, count=3)
    expect(tmp_path, {0, 1, 2})
    assert note.read_text() == "mine" and (tmp_path / "segment-x.kv").read_text() == "mine too"


def test_of_a_key_on_two_disks_the_later_write_wins(tmp_path: Path) -> None:
    """Disk b was away when the key was removed and written again on a."""
    a, b = tmp_path / "a", tmp_path / "b"
    with Driver(b) as driver:
        driver.put(b"name", b"old" * 50)
    with Driver(b, a) as driver:
        driver.put(b"filler", b"f" * 900_000)  # b holds more now, so the next goes to a
        location = driver.tier.location(b"filler")
        assert location is not None and location.disk == 0
    with Driver(a, tmp_path / "c") as driver:
        for number in range(30):
            driver.put(key_of(number), make_data(number, 5000))
        driver.put(b"name", b"new" * 50)
    for order in ((a, b, tmp_path / "c"), (b, tmp_path / "c", a)):
        with Driver(*order) as driver:
            assert driver.get(b"name") == b"new" * 50


def test_partial_snapshots_of_a_crash_are_cleared_away(tmp_path: Path) -> None:
    fill(tmp_path, count=3)
    half = tmp_path / "segment-000000000001.index.tmp"
    half.write_bytes(b"half")
    orphan = tmp_path / "segment-000000000007.index"
    shutil.copy(tmp_path / "segment-000000000001.index", orphan)
    expect(tmp_path, {0, 1, 2})
    assert not half.exists() and not orphan.exists()


def test_a_capacity_larger_than_the_disk_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for capacity_bytes in (1 << 20, 1 << 60):
        folder = Directory(tmp_path, capacity_bytes, DiskIo())
        folder.lock()
        folder.unlock()
    assert caplog.text.count("is the disk mounted?") == 1
