"""A real store with an SSD level that is killed, runs out of disk, or reads back other bytes than it
wrote."""

import contextlib
import os
import random
import resource
import signal
import threading
import time
from pathlib import Path

import pytest

from kvcore import metrics
from kvcore.wire.messages import Lookup, LookupReply, Put, Status, Tier
from tests.integration.store_harness import RawClient, StartStore, StoreProcess, eventually
from tests.integration.store_harness import short_dir as short_dir
from tests.integration.store_harness import start_store as start_store
from tests.integration.test_store_ssd import levels

OK = Status.OK
SIZE = 128 << 10
POOL = "16mb"
KILLS = 5


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def value(number: int) -> bytes:
    return random.Random(number).randbytes(64) * (SIZE // 64)


def ssd_flags(path: Path) -> tuple[str, ...]:
    return levels(path, capacity="1gb")


def tiers(client: RawClient, numbers: list[int]) -> dict[int, Tier]:
    found = {}
    for number in numbers:
        reply, _ = client.ask(Lookup, keys=[key(number)])
        assert isinstance(reply, LookupReply)
        if reply.num_hits:
            found[number] = Tier(reply.tiers[0])
    return found


def put_until_the_store_dies(client: RawClient, first: int, done: list[int]) -> None:
    number = first
    with contextlib.suppress(ConnectionError, OSError):
        while True:
            assert client.put([key(number)], [value(number)]) == [OK]
            done.append(number)
            number += 1


@pytest.mark.slow
def test_what_was_on_disk_survives_kills_at_random_moments(start_store: StartStore, short_dir: Path) -> None:
    source = random.Random(20260702)
    on_disk: set[int] = set()
    for round_number in range(KILLS):
        store = start_store(*ssd_flags(short_dir / "ssd"), pool_size=POOL)
        client = store.connect()
        check(client, on_disk)
        written: list[list[int]] = [[], []]
        writers = [
            threading.Thread(
                target=put_until_the_store_dies,
                args=(store.connect(), round_number * 1_000_000 + index * 100_000, done),
            )
            for index, done in enumerate(written)
        ]
        for writer in writers:
            writer.start()
        # The pool holds about 120 objects: from then on the disk is written all the time.
        eventually(lambda: sum(map(len, written)) >= source.randrange(150, 400))  # noqa: B023
        sample = [number for done in written for number in done[:60]]
        on_disk |= {number for number, tier in tiers(client, sample).items() if tier == Tier.SSD}
        time.sleep(source.random() * 0.2)
        store.process.send_signal(signal.SIGKILL)
        for writer in writers:
            writer.join()
        store.stop(signal.SIGKILL)
    store = start_store(*ssd_flags(short_dir / "ssd"), pool_size=POOL)
    assert len(on_disk) >= 100
    check(store.connect(), on_disk)
    assert store.stats()["ssd_corrupt_total"] == 0


def check(client: RawClient, numbers: set[int]) -> None:
    for number in numbers:
        assert client.read([key(number)]) == [value(number)], f"object {number}"


def test_a_disk_that_becomes_full_costs_nothing_but_the_second_tier(
    start_store: StartStore, short_dir: Path
) -> None:
    store = start_store(*ssd_flags(short_dir / "ssd"), pool_size=POOL)
    client = store.connect()
    put(client, range(200))
    before = [number for number, tier in tiers(client, list(range(200))).items() if tier == Tier.SSD]
    assert before
    # No file may grow beyond what the segments have now: every further one is refused by the kernel.
    limit_file_size(store, 1 << 20)
    put(client, range(200, 1200))
    stats = store.stats()
    assert stats[metrics.RESERVE_FULL_TOTAL] == 0
    assert stats["ssd_disks_failed"] == 0
    assert client.read([key(before[0]), key(1199)]) == [value(before[0]), value(1199)]
    # Room again: it is used again.
    limit_file_size(store, resource.RLIM_INFINITY)
    written = store.stats()["ssd_written_objects_total"]
    numbers = iter(range(10_000, 1_000_000))

    def writes_to_disk_again() -> bool:
        number = next(numbers)
        put(client, range(number, number + 1))
        return store.stats()["ssd_written_objects_total"] > written

    eventually(writes_to_disk_again)


def put(client: RawClient, numbers: range) -> None:
    for number in numbers:
        assert client.put([key(number)], [value(number)]) == [OK]


def limit_file_size(store: StoreProcess, size_bytes: int) -> None:
    hard = resource.prlimit(store.process.pid, resource.RLIMIT_FSIZE)[1]
    resource.prlimit(store.process.pid, resource.RLIMIT_FSIZE, (size_bytes, hard))


def test_bytes_that_changed_on_disk_are_never_served(start_store: StartStore, short_dir: Path) -> None:
    store = start_store(*ssd_flags(short_dir / "ssd"), pool_size=POOL)
    client = store.connect()
    put(client, range(300))
    assert store.stop() == 0
    source = random.Random(11)
    for path in (short_dir / "ssd").glob("*.kv"):
        fd = os.open(path, os.O_RDWR)
        for _ in range(20):
            position = source.randrange(os.fstat(fd).st_size)
            os.pwrite(fd, bytes([os.pread(fd, 1, position)[0] ^ 0x40]), position)
        os.close(fd)
    store = start_store(*ssd_flags(short_dir / "ssd"), pool_size=POOL)
    client = store.connect()
    answers = {number: client.read([key(number)])[0] for number in range(300)}
    wrong = [number for number, answer in answers.items() if answer not in (value(number), Status.CORRUPT)]
    assert not wrong
    corrupt = [number for number, answer in answers.items() if answer == Status.CORRUPT]
    assert corrupt and store.stats()["ssd_corrupt_total"] == len(corrupt)
    # A corrupt object is dropped, so that it can be computed and written anew.
    assert client.read([key(corrupt[0])]) == [Status.MISSING]
    assert client.put([key(corrupt[0])], [value(corrupt[0])]) == [OK]
    assert client.read([key(corrupt[0])]) == [value(corrupt[0])]


def test_clients_that_vanish_while_they_wait_leave_nothing_behind(
    start_store: StartStore, short_dir: Path
) -> None:
    store = start_store(*ssd_flags(short_dir / "ssd"), pool_size=POOL)
    source = random.Random(5)
    for round_number in range(20):
        client = store.connect()
        count = source.randrange(1, 30)
        numbers = range(round_number * 100, round_number * 100 + count)
        payload = b"".join(value(number) for number in numbers)
        client.sock.settimeout(0.2)
        with contextlib.suppress(TimeoutError):
            client.ask(Put, payload, keys=[key(number) for number in numbers], sizes_bytes=[SIZE] * count)
        client.close()
    survivor = store.connect()
    eventually(lambda: store.stats()[metrics.CONNECTIONS] == 1)

    def is_clean() -> bool:
        stats = store.stats()
        return not (stats[metrics.OBJECTS_PENDING] or stats[metrics.WAITING_FOR_ROOM])

    eventually(is_clean)
    put(survivor, range(50_000, 50_300))
    assert survivor.read([key(50_000)]) == [value(50_000)]
