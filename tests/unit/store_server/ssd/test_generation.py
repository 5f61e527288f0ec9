"""A disk that was out of service while objects were removed brings none of them back."""

import errno
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.wire.messages import Status
from store_server.ssd.format import PAGE_BYTES
from store_server.ssd.generation import Generation, decode_generation, encode_generation
from tests.faults.test_ssd_disk_faults import FaultyIo
from tests.unit.store_server.ssd.harness import Driver, key_of, make_data

SIZE = 20_000
NUM = 16


def fill(driver: Driver, numbers: range = range(NUM)) -> None:
    for number in numbers:
        assert driver.put(key_of(number), make_data(number, SIZE)) == Status.OK


def held_by(driver: Driver, disk: int) -> list[int]:
    return [n for n in range(NUM) if (place := driver.tier.location(key_of(n))) and place.disk == disk]


def take_out(driver: Driver, io: FaultyIo, name: str) -> None:
    """The disk refuses writes, and with the next one it is out of service."""
    io.fault = lambda call, path: errno.EROFS if call == "write" and f"/{name}/" in path else None
    failed = driver.tier.stats()["disks_failed"]
    for number in range(100, 200):
        if driver.tier.stats()["disks_failed"] > failed:
            return
        driver.put(key_of(number), make_data(number, SIZE))
    raise AssertionError("it should have been written to")


def removed_by_a_client(driver: Driver, *keys: bytes) -> None:
    driver.tier.note_removal()
    driver.tier.remove(keys)


@pytest.mark.parametrize("generation", [Generation(), Generation(7, 3), Generation(1 << 31, 1 << 31)])
def test_a_note_is_read_back_and_anything_else_counts_as_old(generation: Generation) -> None:
    page = encode_generation(generation)
    assert len(page) == PAGE_BYTES and decode_generation(page) == generation
    for spoilt in (b"", page[:20], bytes(PAGE_BYTES), page[:9] + b"!" + page[10:]):
        assert decode_generation(spoilt) == Generation()


def test_what_was_removed_meanwhile_stays_away(tmp_path: Path) -> None:
    io = FaultyIo()
    with Driver(tmp_path / "good", tmp_path / "bad", io=io) as driver:
        fill(driver)
        on_bad, on_good = held_by(driver, 1), held_by(driver, 0)
        take_out(driver, io, "bad")
        removed_by_a_client(driver, key_of(on_bad[0]))
    io.fault = lambda call, path: None
    for _ in range(2):
        with Driver(tmp_path / "good", tmp_path / "bad", io=io) as driver:
            assert driver.get(key_of(on_bad[0])) is None
            assert all(driver.get(key_of(n)) == make_data(n, SIZE) for n in on_good)
            assert driver.tier.stats()["disks_failed"] == 0


def test_without_a_removal_everything_comes_back(tmp_path: Path) -> None:
    io = FaultyIo()
    with Driver(tmp_path / "good", tmp_path / "bad", io=io) as driver:
        fill(driver)
        removed_by_a_client(driver, key_of(0))  # before, so both know of it
        while driver.tier.stats()["objects"] == NUM:
            driver.step()
        fill(driver, range(200, 202))
        take_out(driver, io, "bad")
    io.fault = lambda call, path: None
    with Driver(tmp_path / "good", tmp_path / "bad", io=io) as driver:
        assert [n for n in range(NUM) if driver.get(key_of(n)) is None] == [0]


def test_a_removal_on_its_way_to_a_disk_that_fails_is_not_lost(tmp_path: Path) -> None:
    io = FaultyIo()
    with Driver(tmp_path / "good", tmp_path / "bad", io=io) as driver:
        fill(driver)
        doomed = held_by(driver, 1)[0]
        io.fault = lambda call, path: errno.EROFS if call == "write" and "/bad/" in path else None
        removed_by_a_client(driver, key_of(doomed))
        while "disk failed" not in driver.dropped().values():
            driver.step()
    io.fault = lambda call, path: None
    with Driver(tmp_path / "good", tmp_path / "bad", io=io) as driver:
        assert driver.get(key_of(doomed)) is None


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EFBIG, errno.EROFS])
@pytest.mark.parametrize("waits_s", [0.0, 0.2])
def test_a_removal_that_a_stop_leaves_no_time_to_write_is_not_lost(
    tmp_path: Path, code: int, waits_s: float
) -> None:
    """Whether the disk's thread has found out by then, or the stop comes first."""
    io = FaultyIo()
    with Driver(tmp_path / "only", io=io, retry_s=60) as driver:
        fill(driver)
    with Driver(tmp_path / "only", io=io, retry_s=60) as driver:
        io.fault = lambda call, path: code if "segment" in path and call in ("create", "write") else None
        removed_by_a_client(driver, key_of(3))
        time.sleep(waits_s)
    io.fault = lambda call, path: None
    with Driver(tmp_path / "only", io=io) as driver:
        assert driver.get(key_of(3)) is None


def test_the_other_disks_are_told_of_it(tmp_path: Path) -> None:
    io = FaultyIo()
    paths = [tmp_path / "good", tmp_path / "bad"]
    with Driver(*paths, io=io) as driver:
        fill(driver)
        on_good, on_bad = held_by(driver, 0), held_by(driver, 1)
    with Driver(*paths, io=io) as driver:
        io.fault = lambda call, path: errno.EROFS if "/bad/" in path and call in ("create", "write") else None
        removed_by_a_client(driver, key_of(on_bad[0]))
    io.fault = lambda call, path: None
    with Driver(*paths, io=io) as driver:
        assert driver.get(key_of(on_bad[0])) is None
        assert all(driver.get(key_of(number)) == make_data(number, SIZE) for number in on_good)


def test_the_only_disk_is_not_trusted_if_it_still_takes_the_note(tmp_path: Path) -> None:
    io = FaultyIo()
    with Driver(tmp_path / "only", io=io) as driver:
        fill(driver)
        io.fault = lambda call, path: errno.EIO if call == "read" else None
        for number in range(3):
            driver.load(key_of(number))
        while len(driver.tier):
            driver.step()
        removed_by_a_client(driver, key_of(9))
    io.fault = lambda call, path: None
    for _ in range(2):
        with Driver(tmp_path / "only", io=io) as driver:
            assert driver.get(key_of(9)) is None
            assert driver.put(key_of(50), make_data(50, SIZE)) == Status.OK
    with Driver(tmp_path / "only", io=io) as driver:
        assert driver.get(key_of(50)) == make_data(50, SIZE), "only what was there then is gone"


def test_a_path_that_was_left_out_of_the_configuration(tmp_path: Path) -> None:
    with Driver(tmp_path / "a", tmp_path / "b") as driver:
        fill(driver)
        on_b = held_by(driver, 1)
    with Driver(tmp_path / "a") as driver:
        removed_by_a_client(driver, key_of(on_b[0]))  # which this store cannot see
    with Driver(tmp_path / "a", tmp_path / "b") as driver:
        assert all(driver.get(key_of(n)) is None for n in on_b)


def test_a_block_device_notes_it_as_well(tmp_path: Path) -> None:
    device = tmp_path / "device"
    device.write_bytes(b"")
    with device.open("r+b") as file:
        file.truncate(24 << 20)
    with Driver(tmp_path / "a", device) as driver:
        fill(driver)
        on_device = held_by(driver, 1)
        assert on_device
    with Driver(tmp_path / "a") as driver:
        removed_by_a_client(driver, b"anything")
    with Driver(tmp_path / "a", device) as driver:
        assert all(driver.get(key_of(n)) is None for n in on_device)
        fill(driver)
        on_device = held_by(driver, 1)
    with Driver(tmp_path / "a", device) as driver:
        assert held_by(driver, 1) == on_device


STEPS = st.lists(
    st.tuples(st.sampled_from(("put", "remove", "outage")), st.integers(0, 7), st.integers(0, 3)), max_size=12
)


@settings(max_examples=30)
@given(STEPS)
def test_whatever_is_removed_stays_away_until_it_is_put_again(steps: list[tuple[str, int, int]]) -> None:
    """Of three paths some are left out for a while (a bit each for the second and third): then one object is
    removed, and all are there again."""
    with TemporaryDirectory() as name:
        paths = [Path(name) / letter for letter in "abc"]
        driver = Driver(*paths).__enter__()
        try:
            fill(driver, range(8))
            present = set(range(8))
            for step, number, bits in steps:
                if step == "put" and key_of(number) not in driver.tier:
                    assert driver.put(key_of(number), make_data(number, SIZE)) == Status.OK
                    present.add(number)
                elif step == "remove":
                    removed_by_a_client(driver, key_of(number))
                    present.discard(number)
                elif step == "outage":
                    driver.close()
                    driver = Driver(paths[0], *[p for bit, p in enumerate(paths[1:]) if bits >> bit & 1])
                    driver.__enter__()
                    removed_by_a_client(driver, key_of(number))
                    present.discard(number)
                    driver.close()
                    driver = Driver(*paths).__enter__()
                found = {number for number in range(8) if key_of(number) in driver.tier}
                assert found <= present, (step, number, bits)
        finally:
            driver.close()


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_an_object_that_was_put_again_while_its_disk_was_away(tmp_path: Path, order: str) -> None:
    paths = [tmp_path / letter for letter in order]
    on_a, on_b = range(100, 104), range(NUM)
    with Driver(tmp_path / "b") as driver:
        fill(driver, on_b)
    with Driver(tmp_path / "a") as driver:
        fill(driver, on_a)
    # Less was ever written to this one, and yet what comes now is later than what the other has.
    with Driver(tmp_path / "a") as driver:
        for number in on_b:
            assert driver.put(key_of(number), make_data(100 + number, SIZE)) == Status.OK
    with Driver(*paths) as driver:
        for number in on_b:
            assert driver.get(key_of(number)) == make_data(100 + number, SIZE), "the later value"
        assert all(driver.get(key_of(number)) == make_data(number, SIZE) for number in on_a)
        removed_by_a_client(driver, *map(key_of, on_b))
        fill(driver, range(200, 202))
    for _ in range(2):
        with Driver(*paths) as driver:
            assert [n for n in on_b if key_of(n) in driver.tier] == []
            assert all(driver.get(key_of(number)) == make_data(number, SIZE) for number in on_a)


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(st.sampled_from(("put", "put", "remove", "restart")), st.integers(0, 3), st.integers(0, 3)),
        max_size=20,
    )
)
def test_what_is_found_is_what_was_put_last(steps: list[tuple[str, int, int]]) -> None:
    """Paths come and go (a bit each for the second and third) without anybody removing anything in between:
    an object that was put again meanwhile then lies on two disks, and may be removed after that."""
    with TemporaryDirectory() as name:
        paths = [Path(name) / letter for letter in "abc"]
        driver = Driver(*paths).__enter__()
        latest: dict[int, int] = {}
        try:
            for version, (step, number, bits) in enumerate(steps, start=1):
                if step == "put" and key_of(number) not in driver.tier:
                    assert driver.put(key_of(number), make_data(version, SIZE)) == Status.OK
                    latest[number] = version
                elif step == "remove":
                    removed_by_a_client(driver, key_of(number))
                    latest.pop(number, None)
                elif step == "restart":
                    driver.close()
                    driver = Driver(paths[0], *[p for bit, p in enumerate(paths[1:]) if bits >> bit & 1])
                    driver.__enter__()
                for found in range(4):
                    if key_of(found) in driver.tier:
                        assert found in latest, (step, number, bits)
                        assert driver.get(key_of(found)) == make_data(latest[found], SIZE)
        finally:
            driver.close()
