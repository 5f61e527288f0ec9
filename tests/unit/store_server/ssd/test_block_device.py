"""Segments on a block device without a file system. A plain file stands for the device."""

import os
import random
from pathlib import Path

import pytest

from kvcore.errors import ConfigError, KVError
from kvcore.wire.messages import Status
from store_server.ssd.disk_io import DiskIo
from store_server.ssd.format import PAGE_BYTES
from store_server.verify import verify_paths
from tests.unit.store_server.ssd.harness import SEGMENT_BYTES, Driver, flip_byte, key_of, make_data

SLOT = PAGE_BYTES + SEGMENT_BYTES
OBJECT_BYTES = 50_000


@pytest.fixture
def device(tmp_path: Path) -> Path:
    """Room for eight segments and a bit."""
    path = tmp_path / "nvme1n1"
    path.touch()
    with path.open("r+b") as file:
        file.truncate(PAGE_BYTES + 8 * SLOT + 12_345)
    return path


def fill(driver: Driver, numbers: range) -> None:
    for number in numbers:
        assert driver.put(key_of(number), make_data(number, OBJECT_BYTES), num_layers=3) is Status.OK


def test_what_is_written_is_read_and_found_again(device: Path) -> None:
    with Driver(device) as driver:
        fill(driver, range(60))
        driver.remove(key_of(7))
        assert driver.get(key_of(59), aligned=False) == make_data(59, OBJECT_BYTES)
    for _ in range(2):
        with Driver(device) as driver:
            assert driver.report is not None and driver.report.num_objects == 59
            assert driver.get(key_of(7)) is None
            for number in (0, 30, 59):
                assert driver.get(key_of(number)) == make_data(number, OBJECT_BYTES)
    assert list(device.parent.iterdir()) == [device]


def test_a_full_device_drops_its_oldest_segments_and_uses_their_slots(device: Path) -> None:
    size_bytes = device.stat().st_size
    with Driver(device) as driver:
        fill(driver, range(400))
        left = {key_of(number) for number in range(400)} - set(driver.dropped())
        assert 100 < len(left) < 170 and key_of(399) in left and key_of(0) not in left
    with Driver(device) as driver:
        assert set(driver.tier) == left
        for number in range(400):
            expected = make_data(number, OBJECT_BYTES) if key_of(number) in left else None
            assert driver.get(key_of(number)) == expected
    assert device.stat().st_size == size_bytes


def test_a_store_that_was_killed_loses_nothing_that_was_written(device: Path) -> None:
    with Driver(device) as driver:
        fill(driver, range(30))
        image = device.read_bytes()
    device.write_bytes(image)
    with Driver(device) as driver:
        assert set(driver.tier) == {key_of(number) for number in range(30)}
        fill(driver, range(30, 60))
        assert driver.get(key_of(29)) == make_data(29, OBJECT_BYTES)
    with Driver(device) as driver:
        assert len(set(driver.tier)) == 60


def test_what_an_older_segment_left_in_a_slot_is_not_taken_for_its_successors(device: Path) -> None:
    with Driver(device) as driver:
        fill(driver, range(200))
        # The open segment lies over an older one, which reaches further.
        image = device.read_bytes()
        there = set(driver.tier)
    device.write_bytes(image)
    with Driver(device) as driver:
        assert set(driver.tier) == there
        for key in there:
            assert driver.get(key) == make_data(int.from_bytes(key[:4], "big"), OBJECT_BYTES)


def test_the_cap_holds_below_the_size_of_the_device(device: Path) -> None:
    with Driver(device, capacity_bytes=PAGE_BYTES + 4 * SLOT) as driver:
        fill(driver, range(200))
    beyond = device.read_bytes()[PAGE_BYTES + 4 * SLOT :]
    assert not any(beyond)


def test_an_object_larger_than_a_slot_is_refused_and_the_rest_goes_on(device: Path) -> None:
    with Driver(device) as driver:
        assert driver.put(key_of(1), make_data(1, 2 * SEGMENT_BYTES)) is Status.FULL
        fill(driver, range(2, 5))
        assert driver.get(key_of(4)) == make_data(4, OBJECT_BYTES)


def test_a_damaged_slot_header_costs_its_segment_only(device: Path) -> None:
    with Driver(device) as driver:
        fill(driver, range(60))
    flip_byte(device, PAGE_BYTES + 9)
    with Driver(device) as driver:
        left = set(driver.tier)
        assert 30 <= len(left) < 60
        fill(driver, range(100, 160))
        for key in left & set(driver.tier):
            assert driver.get(key) == make_data(int.from_bytes(key[:4], "big"), OBJECT_BYTES)


def test_a_damaged_byte_is_a_miss(device: Path) -> None:
    with Driver(device) as driver:
        fill(driver, range(3))
        # Each put is a batch of its own: one header page, then 13 pages of payload.
        flip_byte(device, 2 * PAGE_BYTES + 14 * PAGE_BYTES + PAGE_BYTES + 5)
        assert driver.load(key_of(1))[0] is Status.CORRUPT
        assert driver.get(key_of(0)) == make_data(0, OBJECT_BYTES)


def test_somebody_elses_device_is_not_touched(device: Path) -> None:
    with device.open("r+b") as file:
        file.write(random.Random(1).randbytes(10_000))
    before = device.read_bytes()
    with pytest.raises(ConfigError, match="not empty and not a store's"):
        Driver(device).tier.open()
    assert device.read_bytes() == before


def test_another_layout_is_refused(device: Path) -> None:
    with Driver(device) as driver:
        fill(driver, range(3))
    before = device.read_bytes()
    with pytest.raises(ConfigError, match=r"laid out with slots of 1\.0 MiB, not 2\.0 MiB"):
        Driver(device, segment_bytes=2 * SEGMENT_BYTES).tier.open()
    assert device.read_bytes() == before


def test_a_device_that_is_too_small_says_so(tmp_path: Path) -> None:
    path = tmp_path / "small"
    path.write_bytes(bytes(SLOT))
    with pytest.raises(ConfigError, match="no room for two segments"):
        Driver(path).tier.open()
    with pytest.raises(ConfigError, match="too small for a device"):
        Driver(path, batch_bytes=SEGMENT_BYTES)


def test_two_stores_do_not_share_a_device(device: Path) -> None:
    with Driver(device) as driver:
        with pytest.raises(ConfigError, match="in use by another store"):
            Driver(device).tier.open()
        fill(driver, range(3))


def test_it_goes_past_the_page_cache(device: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags_seen: list[int] = []
    real_open = os.open

    def watched(path: object, flags: int, *rest: object, **more: object) -> int:
        if path == device:
            flags_seen.append(flags)
        return real_open(path, flags, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr("store_server.ssd.disk_io.os.open", watched)
    with Driver(device, io=DiskIo()) as driver:
        fill(driver, range(3))
        assert driver.get(key_of(1)) is not None
    assert sum(bool(flags & os.O_DIRECT) for flags in flags_seen) >= 3


def test_a_stopped_stores_device_can_be_verified(device: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slot_bytes = 2 * (4 << 20)
    with device.open("r+b") as file:
        file.truncate(PAGE_BYTES + 3 * (PAGE_BYTES + slot_bytes))
    with pytest.raises(ConfigError, match="not an SSD path of a store"):
        verify_paths([device], as_json=False)
    with Driver(device, capacity_bytes=1 << 30, segment_bytes=slot_bytes) as driver:
        fill(driver, range(20))
    verify_paths([device], as_json=False)
    assert capsys.readouterr().out == "20 objects checked, 0 corrupt\n"
    flip_byte(device, 2 * PAGE_BYTES + PAGE_BYTES + 5)
    with pytest.raises(KVError, match="1 object of 20"):
        verify_paths([device], as_json=False)
