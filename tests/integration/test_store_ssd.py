"""A real store with an SSD level: more data than DRAM, restarts, and every plane's view of what is on
disk."""

import json
import signal
import threading
from pathlib import Path

import pytest

from kvcore import metrics
from kvcore.client.sync_client import StoreClient
from kvcore.wire.messages import (
    Acquire,
    Exists,
    ListKeys,
    Lookup,
    LookupReply,
    Release,
    Remove,
    Reserve,
    Status,
    Tier,
    Write,
)
from tests.integration.store_harness import MIB, RawClient, StartStore, StoreProcess, eventually
from tests.integration.store_harness import short_dir as short_dir
from tests.integration.store_harness import start_store as start_store

OK = Status.OK
SIZE = 256 << 10
POOL = "16mb"
NUM_OBJECTS = 128  # twice the pool


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def value(number: int, size_bytes: int = SIZE) -> bytes:
    return (number.to_bytes(8, "little") * (size_bytes // 8 + 1))[:size_bytes]


def levels(*paths: Path, capacity: str = "256mb") -> tuple[str, ...]:
    """A test machine's disk may stand still for seconds: nobody is refused or misses for that."""
    level = {"level": "ssd", "paths": [str(path) for path in paths], "capacity": capacity}
    patience = ("--room-timeout-ms", "60s", "--promotion-timeout-ms", "60s")
    return ("--storage-levels", json.dumps([level]), *patience)


def put_all(client: RawClient, numbers: range, per_request: int = 4) -> None:
    for first in range(numbers.start, numbers.stop, per_request):
        batch = range(first, min(first + per_request, numbers.stop))
        assert client.put([key(n) for n in batch], [value(n) for n in batch]) == [OK] * len(batch)


def check_all(client: RawClient, numbers: range, per_request: int = 4) -> None:
    for first in range(numbers.start, numbers.stop, per_request):
        batch = range(first, min(first + per_request, numbers.stop))
        assert client.read([key(n) for n in batch]) == [value(n) for n in batch]


def lookup(client: RawClient, numbers: range) -> LookupReply:
    reply, _ = client.ask(Lookup, keys=[key(n) for n in numbers])
    assert isinstance(reply, LookupReply)
    return reply


def test_twice_the_dram_is_written_and_read_back(start_store: StartStore, short_dir: Path) -> None:
    store = start_store(*levels(short_dir / "ssd"), pool_size=POOL)
    client = store.connect()
    put_all(client, range(NUM_OBJECTS))
    reply = lookup(client, range(NUM_OBJECTS))
    assert reply.num_hits == NUM_OBJECTS and set(reply.tiers) == {Tier.DRAM, Tier.SSD}
    assert client.statuses(Exists, [key(n) for n in range(NUM_OBJECTS)]) == [OK] * NUM_OBJECTS
    check_all(client, range(NUM_OBJECTS))
    stats = store.stats()
    assert stats[metrics.RESERVE_FULL_TOTAL] == 0
    assert stats[metrics.PROMOTED_OBJECTS_TOTAL] > 0
    assert stats["ssd_written_objects_total"] >= NUM_OBJECTS // 2
    assert f"mooncake_store_{metrics.PROMOTED_BYTES_TOTAL}" in store.http("/metrics")


def test_several_writers_at_full_speed_lose_nothing(start_store: StartStore, short_dir: Path) -> None:
    store = start_store(*levels(short_dir / "a", short_dir / "b"), pool_size=POOL)
    writers = 4
    share = NUM_OBJECTS // writers
    clients = [store.connect() for _ in range(writers)]
    threads = [
        threading.Thread(target=put_all, args=(client, range(index * share, (index + 1) * share)))
        for index, client in enumerate(clients)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert lookup(clients[0], range(NUM_OBJECTS)).num_hits == NUM_OBJECTS
    check_all(clients[0], range(NUM_OBJECTS))
    assert store.stats()[metrics.RESERVE_FULL_TOTAL] == 0


def test_a_graceful_stop_keeps_everything(start_store: StartStore, short_dir: Path) -> None:
    flags = levels(short_dir / "ssd")
    store = start_store(*flags, pool_size=POOL)
    put_all(store.connect(), range(NUM_OBJECTS))
    assert store.stop() == 0
    store = start_store(*flags, pool_size=POOL)
    client = store.connect()
    reply = lookup(client, range(NUM_OBJECTS))
    assert reply.num_hits == NUM_OBJECTS and set(reply.tiers) == {Tier.SSD}
    check_all(client, range(NUM_OBJECTS))
    rebuilt = [line for line in store.log.read_text().splitlines() if "SSD index rebuilt" in line]
    assert len(rebuilt) == 2 and "segments_scanned=0" in rebuilt[-1]


def test_after_a_kill_what_was_on_disk_is_there(start_store: StartStore, short_dir: Path) -> None:
    flags = levels(short_dir / "ssd")
    store = start_store(*flags, pool_size=POOL)
    client = store.connect()
    put_all(client, range(NUM_OBJECTS))
    on_disk = {n for n in range(NUM_OBJECTS) if lookup(client, range(n, n + 1)).tiers[0] == Tier.SSD}
    assert on_disk
    store.stop(signal.SIGKILL)
    store = start_store(*flags, pool_size=POOL)
    client = store.connect()
    for number in on_disk:
        assert client.read([key(number)]) == [value(number)]


def test_removed_is_removed_from_both_tiers_for_good(start_store: StartStore, short_dir: Path) -> None:
    flags = levels(short_dir / "ssd")
    store = start_store(*flags, pool_size=POOL)
    client = store.connect()
    put_all(client, range(NUM_OBJECTS))
    keys = [key(n) for n in range(0, NUM_OBJECTS, 3)]
    assert client.statuses(Remove, keys) == [OK] * len(keys)
    assert client.statuses(Exists, keys) == [Status.MISSING] * len(keys)
    assert client.put([key(0)], [b"new"]) == [OK]
    assert store.stop() == 0
    store = start_store(*flags, pool_size=POOL)
    client = store.connect()
    assert client.read(keys) == [b"new"] + [Status.MISSING] * (len(keys) - 1)
    assert client.read([key(1)]) == [value(1)]


def test_layers_written_apart_come_back_from_disk(start_store: StartStore, short_dir: Path) -> None:
    store = start_store(*levels(short_dir / "ssd"), pool_size=POOL)
    client = store.connect()
    layers = [value(1000 + layer) for layer in range(4)]
    client.ask(Reserve, keys=[key(500)], sizes_bytes=[4 * SIZE], num_layers=4)
    for layer, data in enumerate(layers):
        assert client.statuses(Write, [key(500)], payload=data, layer_begin=layer, layer_end=layer + 1) == [
            OK
        ]
    put_all(client, range(NUM_OBJECTS))
    assert lookup(client, range(500, 501)).tiers == bytes([Tier.SSD])
    assert client.read([key(500)], layer_begin=1, layer_end=3) == [layers[1] + layers[2]]
    assert lookup(client, range(500, 501)).tiers == bytes([Tier.DRAM])


def test_a_lease_on_what_was_on_disk(start_store: StartStore, short_dir: Path) -> None:
    store = start_store(*levels(short_dir / "ssd"), pool_size=POOL)
    client = store.connect()
    put_all(client, range(NUM_OBJECTS))
    reply, _ = client.ask(Acquire, keys=[key(0)], lease_ms=60_000)
    assert reply.grants[0].status == OK and len(reply.grants[0].checksums) == 1
    put_all(client, range(1000, 1000 + NUM_OBJECTS))
    assert lookup(client, range(1)).tiers == bytes([Tier.DRAM])
    client.ask(Release, lease=reply.lease)


def test_the_listing_shows_both_tiers(start_store: StartStore, short_dir: Path) -> None:
    store = start_store(*levels(short_dir / "ssd"), pool_size=POOL)
    client = store.connect()
    put_all(client, range(NUM_OBJECTS))
    reply, _ = client.ask(ListKeys, limit=10_000)
    assert {info.key for info in reply.keys} == {key(n) for n in range(NUM_OBJECTS)}
    assert {info.tier for info in reply.keys} == {Tier.DRAM, Tier.SSD}


@pytest.mark.parametrize("planes", [("shm", "tcp"), ("tcp",)])
def test_clients_of_every_plane_read_what_is_on_disk(
    start_store: StartStore, short_dir: Path, planes: tuple[str, ...]
) -> None:
    store = start_store(*levels(short_dir / "ssd"), pool_size=POOL)
    with StoreClient.connect(store.ready["address"], planes=planes) as client:
        names = [f"object {n}" for n in range(NUM_OBJECTS)]
        for number, name in enumerate(names):
            assert client.put(name, value(number)) == OK
        for number, name in enumerate(names):
            assert client.get(name) == value(number)
        assert client.batch_exists(names) == [True] * NUM_OBJECTS


def test_a_full_ssd_forgets_the_oldest_and_takes_what_comes(start_store: StartStore, short_dir: Path) -> None:
    store = start_store(*levels(short_dir / "ssd", capacity="32mb"), pool_size=POOL)
    client = store.connect()
    put_all(client, range(3 * NUM_OBJECTS))
    assert store.stats()[metrics.RESERVE_FULL_TOTAL] == 0
    used = sum(path.stat().st_size for path in (short_dir / "ssd").glob("*.kv"))
    assert used <= 32 * MIB
    newest = range(3 * NUM_OBJECTS - 32, 3 * NUM_OBJECTS)
    assert lookup(client, newest).num_hits == len(newest)
    check_all(client, newest)


@pytest.mark.slow
def test_bad_levels_are_explained(start_store: StartStore, short_dir: Path) -> None:
    for level, complaint in (
        ({"level": "tape"}, "level 'tape' is not one of gpu, cpu, ssd, remote"),
        ({"level": "ssd", "paths": ["/tmp/x"]}, "needs a capacity"),
        ({"level": "cpu", "capacity": "1gb", "url": "s3://x"}, "`url` is no setting of the cpu level"),
        ({"level": "cpu", "capacity": "1gb", "paths": ["/x", "/y"]}, "mapped from one path"),
        ({"level": "ssd", "size": 1}, "size"),
    ):
        with pytest.raises(AssertionError, match=complaint):
            start_store("--storage-levels", json.dumps([level]))


def test_two_stores_on_one_path_are_refused(start_store: StartStore, short_dir: Path) -> None:
    first = start_store(*levels(short_dir / "ssd"))
    with pytest.raises(AssertionError, match="in use by another store"):
        StoreProcess(short_dir, *levels(short_dir / "ssd"))
    assert eventually(lambda: first.process.poll() is None)


def test_prefetching_brings_objects_back_to_dram(start_store: StartStore, short_dir: Path) -> None:
    store = start_store(*levels(short_dir / "ssd"), pool_size="16mb")
    put_all(store.connect(), range(NUM_OBJECTS))
    with StoreClient.connect(f"127.0.0.1:{store.ready['port']}") as client:
        keys = [key(number) for number in range(16)]

        def tiers() -> list[int]:
            return [info.tier if info else Tier.NONE for info in client.describe(keys)]

        def all_on_disk() -> bool:
            client.evict()
            return client.stats()[metrics.OBJECTS] == 0

        eventually(all_on_disk)
        assert [client.get_size(one) for one in keys] == [SIZE] * 16
        assert tiers() == [Tier.SSD] * 16, "asking brings nothing back"
        fetching = client.prefetch([*keys, b"absent" + bytes(26)])
        assert fetching.wait() == [OK] * 16 + [Status.MISSING]
        assert tiers() == [Tier.DRAM] * 16
        assert client.stats()[metrics.PROMOTED_OBJECTS_TOTAL] == 16


@pytest.mark.slow
def test_what_was_removed_while_a_path_was_out_of_use_does_not_return(
    start_store: StartStore, short_dir: Path
) -> None:
    both = levels(short_dir / "a", short_dir / "b")
    first = start_store(*both, pool_size=POOL)
    put_all(first.connect(), range(40))
    assert first.stop() == 0

    alone = start_store(*levels(short_dir / "a"), pool_size=POOL)
    client = alone.connect()
    statuses = client.statuses(Exists, [key(number) for number in range(40)])
    on_b = [number for number in range(40) if statuses[number] == Status.MISSING]
    assert 0 < len(on_b) < 40
    assert client.statuses(Remove, [key(on_b[0])]) == [Status.MISSING], "it cannot be seen"
    assert alone.stop() == 0

    again = start_store(*both, pool_size=POOL)
    client = again.connect()
    statuses = client.statuses(Exists, [key(number) for number in range(40)])
    assert [number for number in range(40) if statuses[number] == Status.MISSING] == on_b
    put_all(client, range(on_b[0], on_b[0] + 1))
    assert again.stop() == 0
    last = start_store(*both, pool_size=POOL)
    check_all(last.connect(), range(on_b[0], on_b[0] + 1))
