"""A real store with a remote level: below DRAM alone, below an SSD, shared by two stores, down and back."""

import contextlib
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcore import metrics
from kvcore.wire.messages import Evict, Exists, Lookup, LookupReply, Remove, Status, Tier
from store_server.cli import main
from tests.integration.store_harness import RawClient, StartStore, StoreProcess, eventually
from tests.integration.store_harness import short_dir as short_dir
from tests.integration.store_harness import start_store as start_store
from tests.remotes import S3_OPTIONS, ValkeyServer, make_bucket, s3_server, valkey_server

OK = Status.OK
SIZE = 256 << 10
POOL = "16mb"
NUM_OBJECTS = 128  # twice the pool
HALF_A_POOL = 32


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def value(number: int) -> bytes:
    return (number.to_bytes(8, "little") * (SIZE // 8 + 1))[:SIZE]


def levels(url: str, *, ssd: Path | None = None, ssd_capacity: str = "256mb", **remote: Any) -> list[str]:
    given: list[dict[str, Any]] = []
    if ssd is not None:
        given.append({"level": "ssd", "paths": [str(ssd)], "capacity": ssd_capacity})
    given.append({"level": "remote", "url": url, "refresh": "200ms", **remote})
    flags = [
        "--storage-levels",
        json.dumps(given),
        "--promotion-timeout-ms",
        "60s",
        "--room-timeout-ms",
        "60s",
    ]
    # Background eviction begins early, so that puts at full speed do not overtake a remote.
    return [*flags, "--high-watermark", "0.5", "--low-watermark", "0.4"]


def put_all(client: RawClient, numbers: range) -> None:
    for number in numbers:
        assert client.put([key(number)], [value(number)]) == [OK]


def put_slowly(store: StoreProcess, client: RawClient, numbers: range) -> None:
    """Not faster than the remote takes what is above the high watermark."""
    written = store.stats()["remote_written_objects_total"]
    for first in range(numbers.start, numbers.stop, 8):
        put_all(client, range(first, min(first + 8, numbers.stop)))
        wanted = written + first - numbers.start - HALF_A_POOL
        eventually(lambda: store.stats()["remote_written_objects_total"] >= wanted)  # noqa: B023


def readable(client: RawClient, numbers: range) -> int:
    """How many can be read; each that can has the right bytes."""
    found = 0
    for number in numbers:
        (got,) = client.read([key(number)])
        assert got == value(number) or isinstance(got, Status), number
        found += isinstance(got, bytes)
    return found


def lookup(client: RawClient, numbers: range) -> LookupReply:
    reply, _ = client.ask(Lookup, keys=[key(n) for n in numbers])
    assert isinstance(reply, LookupReply)
    return reply


@pytest.fixture
def valkey(short_dir: Path) -> Iterator[ValkeyServer]:
    with valkey_server(short_dir) as server:
        yield server


def test_below_dram_it_holds_what_dram_does_not(start_store: StartStore, short_dir: Path) -> None:
    store = start_store(*levels(f"file://{short_dir}/remote"), pool_size=POOL)
    client = store.connect()
    put_slowly(store, client, range(NUM_OBJECTS))
    reply = lookup(client, range(NUM_OBJECTS))
    assert reply.num_hits == NUM_OBJECTS and set(reply.tiers) == {Tier.DRAM, Tier.REMOTE}
    oldest = range(24)  # with those in DRAM they fit: room is made at the expense of what is not saved yet
    assert readable(client, oldest) == len(oldest)
    stats = store.stats()
    assert stats[metrics.RESERVE_FULL_TOTAL] == 0 and stats["remote_read_objects_total"] > 0
    assert "mooncake_store_remote_written_bytes_total" in store.http("/metrics")
    assert client.statuses(Remove, [key(0)]) == [OK] and readable(client, range(1)) == 0


def test_a_graceful_stop_saves_everything_and_another_store_finds_it(
    start_store: StartStore, short_dir: Path
) -> None:
    flags = levels(f"file://{short_dir}/remote")
    first = start_store(*flags, pool_size=POOL)
    put_slowly(first, first.connect(), range(NUM_OBJECTS))
    assert first.stop() == 0
    second = start_store(*flags, pool_size=POOL)
    client = second.connect()
    eventually(lambda: lookup(client, range(NUM_OBJECTS)).num_hits == NUM_OBJECTS)
    assert readable(client, range(NUM_OBJECTS)) == NUM_OBJECTS


def test_writers_are_not_held_up_by_a_remote(start_store: StartStore, short_dir: Path) -> None:
    store = start_store(*levels(f"file://{short_dir}/remote"), pool_size=POOL)
    client = store.connect()
    put_all(client, range(3 * NUM_OBJECTS))
    assert store.stats()[metrics.RESERVE_FULL_TOTAL] == 0
    newest = range(3 * NUM_OBJECTS - 20, 3 * NUM_OBJECTS)
    assert readable(client, newest) == len(newest)
    assert readable(client, range(3 * NUM_OBJECTS)) > NUM_OBJECTS // 2


def test_below_an_ssd_it_gets_what_the_ssd_will_give_up(start_store: StartStore, short_dir: Path) -> None:
    flags = levels(f"file://{short_dir}/remote", ssd=short_dir / "ssd", ssd_capacity="16mb")
    store = start_store(*flags, pool_size=POOL)
    client = store.connect()
    for first in range(0, 2 * NUM_OBJECTS, 8):
        put_all(client, range(first, first + 8))
        eventually(lambda: store.stats()[metrics.REMOTE_COPIES_PENDING] == 0)
        eventually(lambda: store.stats()["remote_in_flight_bytes"] == 0)
    stats = store.stats()
    assert stats["ssd_reclaimed_total"] > 0 and stats[metrics.REMOTE_COPIES_MISSED_TOTAL] == 0
    reply = lookup(client, range(2 * NUM_OBJECTS))
    assert reply.num_hits == 2 * NUM_OBJECTS
    assert set(reply.tiers) == {Tier.DRAM, Tier.SSD, Tier.REMOTE}
    assert readable(client, range(2 * NUM_OBJECTS)) == 2 * NUM_OBJECTS


@pytest.mark.slow
def test_what_an_ssd_held_from_before_is_copied(start_store: StartStore, short_dir: Path) -> None:
    ssd = {"level": "ssd", "paths": [str(short_dir / "ssd")], "capacity": "256mb"}
    first = start_store("--storage-levels", json.dumps([ssd]), pool_size=POOL)
    put_all(first.connect(), range(NUM_OBJECTS))
    assert first.stop() == 0
    second = start_store(*levels(f"file://{short_dir}/remote", ssd=short_dir / "ssd"), pool_size=POOL)
    eventually(lambda: second.stats()["remote_objects"] == NUM_OBJECTS)
    third = start_store(*levels(f"file://{short_dir}/remote"), pool_size=POOL)
    client = third.connect()
    eventually(lambda: lookup(client, range(NUM_OBJECTS)).num_hits == NUM_OBJECTS)
    assert readable(client, range(NUM_OBJECTS)) == NUM_OBJECTS


def test_two_stores_share_a_valkey_server(
    start_store: StartStore, short_dir: Path, valkey: ValkeyServer
) -> None:
    writer = start_store(*levels(valkey.url), pool_size=POOL)
    put_slowly(writer, writer.connect(), range(NUM_OBJECTS))
    num_shared = int(writer.stats()["remote_objects"])
    assert num_shared > NUM_OBJECTS // 3
    reader = start_store(*levels(valkey.url), pool_size=POOL)
    client = reader.connect()
    eventually(lambda: reader.stats()["remote_objects"] >= num_shared)
    assert readable(client, range(NUM_OBJECTS)) >= num_shared


@pytest.mark.slow
def test_a_remote_that_is_down_costs_misses_only(
    start_store: StartStore, short_dir: Path, valkey: ValkeyServer
) -> None:
    store = start_store(*levels(valkey.url, timeout="2s"), pool_size=POOL)
    client = store.connect()
    put_slowly(store, client, range(NUM_OBJECTS))
    valkey.kill()
    eventually(lambda: store.stats()["remote_available"] == 0)
    statuses = client.statuses(Exists, [key(n) for n in range(NUM_OBJECTS)])
    num_left = statuses.count(OK)
    assert 0 < num_left < NUM_OBJECTS and statuses.count(Status.MISSING) == NUM_OBJECTS - num_left
    assert 0 < readable(client, range(NUM_OBJECTS)) <= num_left
    put_all(client, range(NUM_OBJECTS, 2 * NUM_OBJECTS))
    assert store.stats()[metrics.RESERVE_FULL_TOTAL] == 0
    valkey.start()
    eventually(lambda: store.stats()["remote_available"] == 1)
    put_slowly(store, client, range(2 * NUM_OBJECTS, 3 * NUM_OBJECTS))
    assert store.stats()["remote_objects"] > 0
    assert store.stop(signal.SIGTERM) == 0


@pytest.mark.slow
def test_after_a_kill_what_is_there_is_whole(start_store: StartStore, short_dir: Path) -> None:
    flags = levels(f"file://{short_dir}/remote")
    first = start_store(*flags, pool_size=POOL)
    client = first.connect()
    for number in range(NUM_OBJECTS):
        put_all(client, range(number, number + 1))
        if first.stats()["remote_written_objects_total"] >= 5:
            break  # others are on their way
    first.stop(signal.SIGKILL)
    second = start_store(*flags, pool_size=POOL)
    client = second.connect()
    eventually(lambda: second.stats()["remote_listings_total"] >= 1)
    num_there = int(second.stats()["remote_objects"])
    assert num_there >= 5 and readable(client, range(NUM_OBJECTS)) == num_there
    assert second.stats()["remote_corrupt_total"] == 0


def test_changed_bytes_are_a_miss_and_dropped(start_store: StartStore, short_dir: Path) -> None:
    flags = levels(f"file://{short_dir}/remote")
    first = start_store(*flags, pool_size=POOL)
    put_all(first.connect(), range(8))
    assert first.stop() == 0
    files = sorted(path for path in (short_dir / "remote").rglob("*") if path.is_file())
    assert len(files) == 8
    for path in files[:3]:
        data = bytearray(path.read_bytes())
        data[-100] ^= 1
        path.write_bytes(data)
    files[3].write_bytes(files[3].read_bytes()[:-1])
    second = start_store(*flags, pool_size=POOL)
    client = second.connect()
    eventually(lambda: second.stats()["remote_objects"] == 8)
    assert readable(client, range(8)) == 4
    assert second.stats()["remote_corrupt_total"] == 4
    eventually(lambda: sum(path.is_file() for path in (short_dir / "remote").rglob("*")) == 4)


@pytest.mark.slow
def test_an_object_store_that_speaks_s3(start_store: StartStore, short_dir: Path) -> None:
    with s3_server(short_dir) as endpoint:
        make_bucket(endpoint, "blocks")
        flags = levels("s3://blocks/kv", options={**S3_OPTIONS, "endpoint": endpoint}, timeout="60s")
        store = start_store(*flags, pool_size=POOL)
        client = store.connect()
        put_slowly(store, client, range(48))
        # 48 objects, and a pool for fewer: what does not fit goes there in its own time.
        eventually(lambda: store.stats()["remote_objects"] >= 10)
        assert readable(client, range(48)) == 48
        assert store.stop() == 0


@pytest.mark.slow
def test_bad_remotes_are_explained(start_store: StartStore) -> None:
    for level, complaint in (
        ({"level": "remote"}, "needs a `url`"),
        ({"level": "remote", "url": "ftp://x/y"}, "must begin with one of"),
        ({"level": "remote", "url": "s3://b", "paths": ["/x"]}, "`paths` is no setting of the remote level"),
        ({"level": "ssd", "url": "s3://b", "paths": ["/x"]}, "`url` is no setting of the ssd level"),
        ({"level": "remote", "url": "s3://b", "options": {"colour": "red"}}, "colour"),
    ):
        with pytest.raises(AssertionError, match=complaint):
            start_store("--storage-levels", json.dumps([level]))


def verify(store: StoreProcess, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any], str]:
    """Exit status, the report, and what was complained about."""
    status = main(["verify", "--json", "--address", store.ready["address"]])
    captured = capsys.readouterr()
    return status, json.loads(captured.out), captured.err


@pytest.mark.slow
def test_a_check_reads_the_remote_and_says_when_it_cannot(
    start_store: StartStore, short_dir: Path, valkey: ValkeyServer, capsys: pytest.CaptureFixture[str]
) -> None:
    store = start_store(*levels(valkey.url, timeout="5s"), pool_size=POOL)
    put_slowly(store, store.connect(), range(NUM_OBJECTS))
    eventually(lambda: store.stats()["remote_in_flight_bytes"] == 0)
    status, sound, _ = verify(store, capsys)
    assert status == 0 and sound["trouble"] == "" and sound["num_corrupt"] == 0
    num_remote = sound["levels"]["remote"]["num_objects"]
    assert sound["levels"]["remote"]["num_done"] == num_remote > NUM_OBJECTS // 3
    assert sound["levels"]["dram"]["num_objects"] > 0 and "ssd" not in sound["levels"]

    client = valkey.client()
    (name,) = client.scan(count=1)[1][:1]
    client.setrange(name, 5000, b"spoilt")
    client.close()
    status, damaged, complaint = verify(store, capsys)
    assert status == 1 and "dropped as corrupt: 1 object" in complaint
    assert damaged["levels"]["remote"]["num_corrupt"] == damaged["num_corrupt"] == 1

    valkey.kill()
    eventually(lambda: store.stats()["remote_available"] == 0)
    status, down, complaint = verify(store, capsys)
    assert status == 1 and "the remote is down" in complaint
    # Not what it was before: more had been written there until it went down.
    assert down["num_unread"] == store.stats()["remote_objects"] >= num_remote - 1
    left_out = ["verify", "--remote-rate", "0", "--address", store.ready["address"]]
    assert main(left_out) == 0 and "on the remote" not in capsys.readouterr().out


@pytest.mark.slow
def test_what_was_removed_while_the_remote_was_down_does_not_return(
    start_store: StartStore, short_dir: Path, valkey: ValkeyServer
) -> None:
    flags = levels(valkey.url, ssd=short_dir / "ssd", timeout="1s")
    store = start_store(*flags, pool_size=POOL)
    client = store.connect()
    put_all(client, range(20))
    client.ask(Evict)
    eventually(lambda: store.stats()["remote_objects"] == 20)
    valkey.pause()
    try:
        eventually(lambda: store.stats()["remote_available"] == 0)
        assert client.statuses(Remove, [key(number) for number in range(5)]) == [OK] * 5
        assert store.stop() == 0
        assert list((short_dir / "ssd").glob("removed-*"))
        blind = start_store(*flags, pool_size=POOL)
        assert blind.connect().statuses(Remove, [key(7), key(8)]) == [OK] * 2
        assert blind.stop() == 0
    finally:
        valkey.go_on()
    again = start_store(*flags, pool_size=POOL)
    client = again.connect()
    eventually(
        lambda: again.stats()["remote_objects"] == 13 and not again.stats()["remote_deletions_pending"]
    )
    eventually(lambda: not list((short_dir / "ssd").glob("removed-*")))
    statuses = client.statuses(Exists, [key(number) for number in range(20)])
    gone = {number for number in range(20) if statuses[number] == Status.MISSING}
    assert gone == {0, 1, 2, 3, 4, 7, 8}
    with contextlib.closing(valkey.client()) as redis:
        assert redis.dbsize() == 13
