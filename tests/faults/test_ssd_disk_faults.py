"""Disks that fail in all the ways disks do. Nothing raises, nothing wrong is served, other disks go on."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kvcore.errors import ConfigError
from kvcore.wire.messages import Status
from store_server.core.tiering import Acceptance
from store_server.ssd import Written
from store_server.ssd.disk_io import DiskIo
from tests.unit.store_server.ssd.harness import (
    SEGMENT_BYTES,
    Driver,
    data_files,
    flip_byte,
    key_of,
    make_data,
)


def _path_of(fd: int) -> str:
    return str(Path(f"/proc/self/fd/{fd}").readlink())


class FaultyIo(DiskIo):
    """`fault(call, path)` may return an errno to fail with."""

    def __init__(self, fault: Callable[[str, str], int | None] = lambda call, path: None) -> None:
        super().__init__()
        self.fault = fault

    def _check(self, call: str, path: str) -> None:
        code = self.fault(call, path)
        if code is not None:
            raise OSError(code, os.strerror(code), path)

    def open(self, path: Path, flags: int) -> int:
        self._check("create" if flags & os.O_CREAT else "open", str(path))
        return super().open(path, flags)

    def allocate(self, fd: int, size_bytes: int) -> None:
        self._check("allocate", _path_of(fd))
        super().allocate(fd, size_bytes)

    def pwritev(self, fd: int, views: Sequence[memoryview], offset_bytes: int) -> int:
        self._check("write", _path_of(fd))
        return super().pwritev(fd, views, offset_bytes)

    def preadv(self, fd: int, views: Sequence[memoryview], offset_bytes: int) -> int:
        self._check("read", _path_of(fd))
        return super().preadv(fd, views, offset_bytes)


def fill(driver: Driver, numbers: range, size_bytes: int = 50_000) -> None:
    for number in numbers:
        assert driver.put(key_of(number), make_data(number, size_bytes)) == Status.OK


def disk_of(driver: Driver, number: int) -> int:
    location = driver.tier.location(key_of(number))
    assert location is not None
    return location.disk


def test_a_disk_that_fails_on_write_loses_only_what_it_held(tmp_path: Path) -> None:
    io = FaultyIo()
    with Driver(tmp_path / "good", tmp_path / "bad", io=io) as driver:
        fill(driver, range(30))
        held = {key_of(number) for number in range(30) if disk_of(driver, number) == 1}
        assert held
        io.fault = lambda call, path: errno.EIO if call == "write" and "/bad/" in path else None
        fill(driver, range(30, 60))
        assert driver.dropped() == dict.fromkeys(held, "disk failed")
        assert driver.tier.stats()["disks_failed"] == 1
        for number in range(60):
            expected = None if key_of(number) in held else make_data(number, 50_000)
            assert driver.get(key_of(number)) == expected
    io.fault = lambda call, path: None
    with Driver(tmp_path / "good", tmp_path / "bad", io=io) as driver:
        assert all(driver.get(key_of(number)) == make_data(number, 50_000) for number in range(60))


def test_the_write_under_way_on_a_failing_disk_goes_to_another(tmp_path: Path) -> None:
    io = FaultyIo(lambda call, path: errno.EIO if call == "write" and "/bad/" in path else None)
    with Driver(tmp_path / "bad", tmp_path / "good", io=io, queue_bytes=200_000) as driver:
        accepted = 0
        while accepted < 20:
            if driver.begin_put(key_of(accepted), make_data(accepted, 60_000)) is Acceptance.QUEUED:
                accepted += 1
            else:
                driver.step()
        while sum(isinstance(outcome, Written) for outcome in driver.outcomes) < 20:
            driver.step()
        assert all(o.status == Status.OK for o in driver.outcomes if isinstance(o, Written))
        assert all(driver.get(key_of(number)) == make_data(number, 60_000) for number in range(20))


def test_when_the_last_disk_fails_writes_are_refused_and_reads_are_misses(tmp_path: Path) -> None:
    io = FaultyIo()
    with Driver(tmp_path, io=io) as driver:
        fill(driver, range(5))
        io.fault = lambda call, path: errno.EROFS if call == "write" else None
        assert driver.put(key_of(9), b"x" * 5000) == Status.UNAVAILABLE
        assert len(driver.tier) == 0
        assert driver.begin_put(key_of(10), b"x" * 5000) is Acceptance.REFUSED
        assert driver.get(key_of(1)) is None


def test_one_bad_sector_costs_one_object(tmp_path: Path) -> None:
    io = FaultyIo()
    with Driver(tmp_path, io=io) as driver:
        fill(driver, range(10))
        io.fault = lambda call, path: errno.EIO if call == "read" else None
        assert driver.load(key_of(4))[0] == Status.CORRUPT
        io.fault = lambda call, path: None
        assert driver.dropped() == {key_of(4): "corrupt"}
        assert all(driver.get(key_of(number)) is not None for number in range(10) if number != 4)


def test_read_errors_in_a_row_take_the_disk_out(tmp_path: Path) -> None:
    io = FaultyIo()
    with Driver(tmp_path, io=io) as driver:
        fill(driver, range(10))
        io.fault = lambda call, path: errno.EIO if call == "read" else None
        for number in range(3):
            driver.load(key_of(number))
        while driver.tier.stats()["disks_failed"] == 0 or len(driver.tier):
            driver.step()
        assert set(driver.dropped().values()) == {"corrupt", "disk failed"}


def test_running_out_of_file_descriptors_is_not_the_disks_fault(tmp_path: Path) -> None:
    io = FaultyIo()
    with Driver(tmp_path, io=io) as driver:
        fill(driver, range(5))
        io.fault = lambda call, path: errno.EMFILE if call in ("open", "create") else None
        assert driver.load(key_of(1))[0] == Status.UNAVAILABLE
        assert driver.put(b"new segment", b"x" * SEGMENT_BYTES) == Status.FULL
        io.fault = lambda call, path: None
        assert driver.get(key_of(1)) == make_data(1, 50_000)
        assert driver.dropped() == {}
        wait_until_writable(driver)
        assert driver.put(b"new segment", b"x" * SEGMENT_BYTES) == Status.OK


def wait_until_writable(driver: Driver) -> None:
    probe = 1_000_000
    while driver.put(key_of(probe), b"probe") != Status.OK:
        probe += 1


def test_a_full_disk_gives_up_its_oldest_objects_first(tmp_path: Path) -> None:
    """Others filled the disk: room for 3 segments is all there is, far below our own cap."""

    def fault(call: str, path: str) -> int | None:
        return errno.ENOSPC if call == "allocate" and len(data_files(tmp_path)) > 3 else None

    with Driver(tmp_path, io=FaultyIo(fault)) as driver:
        fill(driver, range(100))
        assert len(data_files(tmp_path)) <= 3
        assert 30 <= len(driver.tier) < 70
        assert set(driver.dropped().values()) == {"reclaimed"}
        assert all(driver.get(key) is not None for key in list(driver.tier))


def test_a_disk_full_in_the_middle_of_a_segment_loses_nothing_written(tmp_path: Path) -> None:
    """File systems without preallocation say ENOSPC on write."""
    state = {"full": False}
    io = FaultyIo(lambda call, path: errno.ENOSPC if call == "write" and state["full"] else None)
    with Driver(tmp_path, io=io) as driver:
        fill(driver, range(5))
        state["full"] = True
        assert driver.put(key_of(5), make_data(5, 50_000)) == Status.FULL
        assert driver.begin_put(key_of(6), b"x") is Acceptance.REFUSED
        assert all(driver.get(key_of(number)) == make_data(number, 50_000) for number in range(5))
        state["full"] = False
        wait_until_writable(driver)
        fill(driver, range(6, 30))
    with Driver(tmp_path) as driver:
        assert all(
            driver.get(key_of(number)) == make_data(number, 50_000) for number in range(30) if number != 5
        )


def test_removals_survive_a_full_disk(tmp_path: Path) -> None:
    state = {"full": False}
    io = FaultyIo(lambda call, path: errno.ENOSPC if call == "write" and state["full"] else None)
    with Driver(tmp_path, io=io) as driver:
        fill(driver, range(5))
        state["full"] = True
        driver.tier.remove([key_of(2)])
        assert driver.put(key_of(7), b"x") == Status.FULL
        state["full"] = False
        wait_until_writable(driver)
    with Driver(tmp_path) as driver:
        assert key_of(2) not in driver.tier and key_of(1) in driver.tier


def test_the_file_size_limit_of_the_process_is_a_full_disk(tmp_path: Path) -> None:
    script = """
import resource, sys
from pathlib import Path
from kvcore.wire.messages import Status
from store_server.core.tiering import Acceptance
from tests.unit.store_server.ssd.harness import Driver, key_of
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
with Driver(Path(sys.argv[1])) as driver:
    assert driver.put(key_of(1), b"x" * 5000) == Status.FULL
    assert driver.begin_put(key_of(2), b"x" * 5000) is Acceptance.REFUSED
    print("alive")
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "alive"), done.stderr


@pytest.mark.parametrize("place", range(0, 50_000, 9_999))
def test_flipped_bytes_are_never_served(tmp_path: Path, place: int) -> None:
    with Driver(tmp_path) as driver:
        fill(driver, range(3))
        location = driver.tier.location(key_of(1))
        assert location is not None
        flip_byte(data_files(tmp_path)[0], location.offset_bytes + place)
        status, _, _ = driver.load(key_of(1))
        assert status == Status.CORRUPT
        assert key_of(1) not in driver.tier
        assert driver.get(key_of(0)) is not None and driver.get(key_of(2)) is not None
    with Driver(tmp_path) as driver:
        assert set(driver.tier) == {key_of(0), key_of(2)}


def test_a_deleted_segment_file_is_a_miss(tmp_path: Path) -> None:
    with Driver(tmp_path) as driver:
        fill(driver, range(3))
        for path in data_files(tmp_path):
            path.unlink()
        assert driver.load(key_of(1))[0] == Status.MISSING


def test_a_path_that_cannot_be_used_is_left_out_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    with Driver(tmp_path / "file" / "below", tmp_path / "good") as driver:
        assert driver.report is not None
        assert driver.report.failed_paths == [str(tmp_path / "file" / "below")]
        fill(driver, range(5))
        assert all(driver.get(key_of(number)) is not None for number in range(5))


def test_no_usable_path_at_all_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(ConfigError, match="no SSD path can be used"), Driver(tmp_path / "file" / "below"):
        pass


def test_a_file_system_that_refuses_o_direct_is_used_buffered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real_open = os.open

    def refusing_open(path: str, flags: int, *args: int, **kwargs: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refusing_open)
    with Driver(tmp_path) as driver:
        fill(driver, range(30))
        assert all(driver.get(key_of(number)) == make_data(number, 50_000) for number in range(30))
    assert [record.message for record in caplog.records].count(
        f"{tmp_path}: the file system refuses O_DIRECT, reads and writes go through the page cache"
    ) == 1
