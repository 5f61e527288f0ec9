from pathlib import Path

import pytest
import xxhash

from kvcore.errors import ConfigError
from kvcore.wire.messages import Status
from store_server.core.tiering import Acceptance
from store_server.ssd import DiskConfig, ReadRequest, WriteRequest, Written
from tests.unit.store_server.ssd.harness import (
    SEGMENT_BYTES,
    Driver,
    data_files,
    flip_byte,
    key_of,
    make_data,
)


@pytest.mark.parametrize("size_bytes", [1, 4095, 4096, 4097, 100_000, SEGMENT_BYTES])
@pytest.mark.parametrize("aligned", [True, False])
def test_an_object_comes_back(tmp_path: Path, size_bytes: int, aligned: bool) -> None:
    with Driver(tmp_path) as driver:
        data = make_data(1, size_bytes)
        assert driver.put(key_of(1), data) == Status.OK
        assert key_of(1) in driver.tier
        assert driver.get(key_of(1), aligned=aligned) == data


def test_what_was_never_written_is_a_miss(tmp_path: Path) -> None:
    with Driver(tmp_path) as driver:
        assert driver.tier.location(key_of(1)) is None
        assert not driver.tier.read(ReadRequest(key_of(1), [memoryview(bytearray(8))]))


def test_checksums_of_layers_come_with_the_bytes(tmp_path: Path) -> None:
    with Driver(tmp_path) as driver:
        data = make_data(3, 10_000)
        driver.put(key_of(1), data, num_layers=4)
        status, _, checksums = driver.load(key_of(1))
        assert status == Status.OK
        assert checksums == [xxhash.xxh3_64_intdigest(data[n * 2500 : (n + 1) * 2500]) for n in range(4)]


def test_wrong_checksums_of_a_writer_are_found_out_on_read(tmp_path: Path) -> None:
    with Driver(tmp_path) as driver:
        assert driver.begin_put(key_of(1), b"data" * 10, checksums=[1]) is Acceptance.QUEUED
        driver.step()
        assert driver.get(key_of(1)) is None
        assert driver.dropped() == {key_of(1): "corrupt"}


def test_misuse_is_refused(tmp_path: Path) -> None:
    with Driver(tmp_path) as driver:
        with pytest.raises(ValueError, match="buffers of 4 bytes, not 5"):
            driver.tier.write(WriteRequest(b"k", [memoryview(b"abcd")], 5))
        with pytest.raises(ValueError, match="1 checksums for 2 layers"):
            driver.tier.write(WriteRequest(b"k", [memoryview(b"abcd")], 4, 2, [1]))
        driver.put(b"k", b"abcd")
        with pytest.raises(ValueError, match="has 4 bytes"):
            driver.tier.read(ReadRequest(b"k", [memoryview(bytearray(5))]))


@pytest.mark.parametrize("capacity_bytes", [0, SEGMENT_BYTES])
def test_a_cap_too_small_is_a_configuration_error(tmp_path: Path, capacity_bytes: int) -> None:
    with pytest.raises(ConfigError, match="SSD capacity"):
        Driver(tmp_path, capacity_bytes=capacity_bytes)


def test_the_segment_size_follows_the_cap(tmp_path: Path) -> None:
    assert DiskConfig(path=tmp_path, capacity_bytes=1 << 40).effective_segment_bytes() == 256 << 20
    assert DiskConfig(path=tmp_path, capacity_bytes=64 << 20).effective_segment_bytes() == 4 << 20


def test_two_stores_never_share_a_path(tmp_path: Path) -> None:
    with Driver(tmp_path), pytest.raises(ConfigError, match="in use by another store"), Driver(tmp_path):
        pass


def test_a_removed_object_stays_away_after_a_restart(tmp_path: Path) -> None:
    with Driver(tmp_path) as driver:
        for number in range(5):
            driver.put(key_of(number), make_data(number, 5000))
        driver.remove(key_of(2), key_of(3))
        assert driver.get(key_of(2)) is None
    with Driver(tmp_path) as driver:
        assert set(driver.tier) == {key_of(0), key_of(1), key_of(4)}


def test_a_new_value_after_a_removal_is_the_one_that_stays(tmp_path: Path) -> None:
    with Driver(tmp_path) as driver:
        driver.put(b"name", b"old" * 100)
        driver.tier.remove([b"name"])
        driver.put(b"name", b"new" * 100)
        assert driver.get(b"name") == b"new" * 100
    with Driver(tmp_path) as driver:
        assert driver.get(b"name") == b"new" * 100


def test_removing_what_is_being_written_wins(tmp_path: Path) -> None:
    with Driver(tmp_path) as driver:
        assert driver.begin_put(b"k", b"x" * 9000) is Acceptance.QUEUED
        driver.tier.remove([b"k"])
        assert driver.begin_put(b"k", b"y" * 9000) is Acceptance.BUSY
        while not any(isinstance(outcome, Written) for outcome in driver.outcomes):
            driver.step()
        (written,) = (outcome for outcome in driver.outcomes if isinstance(outcome, Written))
        assert written.status == Status.ABANDONED
        assert driver.put(b"k", b"y" * 9000) == Status.OK
    with Driver(tmp_path) as driver:
        assert driver.get(b"k") == b"y" * 9000


def test_a_removal_during_the_write_survives_a_stop_right_after(tmp_path: Path) -> None:
    with Driver(tmp_path) as driver:
        for number in range(20):
            assert driver.begin_put(key_of(number), make_data(number, 90_000)) is Acceptance.QUEUED
        driver.tier.remove([key_of(number) for number in range(0, 20, 2)])
    with Driver(tmp_path) as driver:
        assert set(driver.tier) == {key_of(number) for number in range(1, 20, 2)}


def test_the_byte_cap_holds_and_the_oldest_goes_first(tmp_path: Path) -> None:
    with Driver(tmp_path, capacity_bytes=4 * SEGMENT_BYTES) as driver:
        for number in range(100):
            assert driver.put(key_of(number), make_data(number, 100_000)) == Status.OK
            assert sum(path.stat().st_size for path in data_files(tmp_path)) <= 4 * SEGMENT_BYTES
        kept = sorted(driver.tier)
        assert kept == [key_of(number) for number in range(100 - len(kept), 100)]
        assert len(kept) >= 20
        gone = {key for key, reason in driver.dropped().items() if reason == "reclaimed"}
        assert gone == {key_of(number) for number in range(100 - len(kept))}
        for number in range(100 - len(kept), 100):
            assert driver.get(key_of(number)) == make_data(number, 100_000)


def test_an_object_larger_than_a_segment_gets_one_of_its_own(tmp_path: Path) -> None:
    with Driver(tmp_path, capacity_bytes=8 * SEGMENT_BYTES) as driver:
        driver.put(b"small", b"s" * 5000)
        big = make_data(9, 3 * SEGMENT_BYTES)
        assert driver.put(b"big", big) == Status.OK
        assert driver.get(b"big") == big and driver.get(b"small") == b"s" * 5000
        assert driver.tier.max_object_bytes == 4 * SEGMENT_BYTES
        assert driver.put(b"huge", bytes(5 * SEGMENT_BYTES)) == Status.FULL


def test_a_lower_cap_after_a_restart_reclaims_at_once(tmp_path: Path) -> None:
    with Driver(tmp_path) as driver:
        for number in range(80):
            driver.put(key_of(number), make_data(number, 100_000))
    with Driver(tmp_path, capacity_bytes=3 * SEGMENT_BYTES) as driver:
        assert sum(path.stat().st_size for path in data_files(tmp_path)) <= 3 * SEGMENT_BYTES
        assert len(driver.tier) < 40
        assert all(driver.get(key) is not None for key in list(driver.tier))


def test_a_full_queue_says_busy_and_loses_nothing(tmp_path: Path) -> None:
    with Driver(tmp_path, queue_bytes=300_000, batch_bytes=100_000) as driver:
        accepted, busy = 0, 0
        while accepted < 60:
            if driver.begin_put(key_of(accepted), make_data(accepted, 90_000)) is Acceptance.QUEUED:
                accepted += 1
            else:
                busy += 1
                driver.step()
            assert driver.tier.stats()["queued_bytes"] <= 300_000
        assert busy > 0
    with Driver(tmp_path) as driver:
        assert all(driver.get(key_of(number)) == make_data(number, 90_000) for number in range(60))


def test_several_disks_share_the_load_and_all_come_back(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a", "b", "c")]
    with Driver(*paths) as driver:
        for number in range(60):
            driver.put(key_of(number), make_data(number, 50_000))
        disks = [location.disk for key in driver.tier if (location := driver.tier.location(key))]
        assert all(disks.count(disk) >= 15 for disk in range(3))
    with Driver(*paths) as driver:
        assert all(driver.get(key_of(number)) == make_data(number, 50_000) for number in range(60))


def test_verify_finds_the_flipped_byte_and_drops_the_object(tmp_path: Path) -> None:
    with Driver(tmp_path) as driver:
        for number in range(20):
            driver.put(key_of(number), make_data(number, 30_000))
        location = driver.tier.location(key_of(7))
        assert location is not None
        flip_byte(data_files(tmp_path)[location.segment_id - 1], location.offset_bytes + 12_345)
        progress: list[tuple[int, int]] = []
        assert driver.tier.verify(lambda done, total: progress.append((done, total))) == (20, [key_of(7)])
        assert progress[-1] == (20, 20)
        driver.step()
        assert key_of(7) not in driver.tier
        assert driver.dropped() == {key_of(7): "corrupt"}
        assert driver.tier.stats()["corrupt_total"] == 1


def test_statistics_add_up(tmp_path: Path) -> None:
    with Driver(tmp_path) as driver:
        for number in range(10):
            driver.put(key_of(number), make_data(number, 10_000))
        driver.get(key_of(3))
        stats = driver.tier.stats()
        assert stats["objects"] == stats["written_objects_total"] == 10
        assert stats["live_bytes"] == stats["written_bytes_total"] == 100_000
        assert stats["read_bytes_total"] == 10_000 and stats["read_objects_total"] == 1
        assert stats["used_bytes"] == sum(path.stat().st_size for path in data_files(tmp_path))
        assert stats["disks"] == 1 and stats["disks_failed"] == 0
        assert stats["metadata_bytes"] > 10 * 64
