"""Requests against a real store process, spoken by hand over TCP and a Unix socket."""

import os
import random
import struct

import pytest
import xxhash

from kvcore import metrics
from kvcore.transport.host import host_id
from kvcore.wire.messages import (
    Abort,
    Await,
    Commit,
    ErrorCode,
    ErrorReply,
    Evict,
    Exists,
    ListKeys,
    Lookup,
    Put,
    Read,
    Remove,
    Reserve,
    Stats,
    Status,
    Write,
)
from tests.integration.store_harness import MIB, RawClient, StartStore, StoreProcess, values_of
from tests.integration.store_harness import shared_store as shared_store
from tests.integration.store_harness import short_dir as short_dir
from tests.integration.store_harness import start_store as start_store
from tests.integration.store_harness import store as store

OK = Status.OK


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


@pytest.mark.parametrize("unix", [False, True])
def test_what_is_put_is_read(store: StoreProcess, unix: bool) -> None:
    client = store.connect(unix=unix)
    values = [os.urandom(size) for size in (1, 100, 4096, 65_537, MIB, 3 * MIB + 5)]
    keys = [key(number) for number in range(len(values))]
    assert client.put(keys, values) == [OK] * len(values)
    assert client.read(keys) == values
    assert client.read([key(99), *reversed(keys)]) == [Status.MISSING, *reversed(values)]
    other = store.connect(unix=not unix)
    assert other.read(keys) == values


def test_many_small_values_in_one_message(store: StoreProcess) -> None:
    client = store.connect()
    source = random.Random(3)
    values = [source.randbytes(source.randrange(1, 9000)) for _ in range(300)]
    keys = [key(number) for number in range(300)]
    assert set(client.put(keys, values)) == {OK}
    assert client.read(keys) == values
    reply, _ = client.ask(Lookup, keys=[*keys, key(1000), key(0)])
    assert reply.num_hits == 300 and reply.layers_ready == [1] * 300


def test_values_larger_than_a_slab_are_scattered_and_whole(start_store: StartStore) -> None:
    client = start_store("--slab-bytes", "64kb", "--eviction-policy", "lru", pool_size="8mb").connect()
    for number in range(40):
        assert client.put([key(number)], [bytes([number]) * 50_000]) == [OK]
    for number in range(0, 40, 2):
        assert client.statuses(Remove, [key(number)]) == [OK]
    value = os.urandom(5 * MIB)
    assert client.put([key(1000)], [value]) == [OK]
    assert client.read([key(1000)]) == [value]


def test_the_payload_of_a_key_that_exists_is_dropped_and_the_next_one_kept(store: StoreProcess) -> None:
    client = store.connect()
    first = os.urandom(400_000)
    assert client.put([key(1)], [first]) == [OK]
    values = [os.urandom(300_000), os.urandom(400_000), os.urandom(7)]
    assert client.put([key(0), key(1), key(2)], values) == [OK, Status.EXISTS, OK]
    assert client.read([key(0), key(1), key(2)]) == [values[0], first, values[2]]


def test_layers_are_read_while_later_ones_are_still_to_come(store: StoreProcess) -> None:
    before = store.stats()
    writer, reader = store.connect(), store.connect()
    layers = [os.urandom(10_000) for _ in range(4)]
    reader.send(Read, keys=[key(1)], layer_begin=0, layer_end=1, wait_ms=60_000)
    reader.send(Read, keys=[key(1)], layer_begin=1, layer_end=4, wait_ms=60_000)
    reply, _ = writer.ask(Reserve, keys=[key(1)], sizes_bytes=[40_000], num_layers=4)
    assert [grant.status for grant in reply.grants] == [OK] and reply.grants[0].extents == []
    assert writer.statuses(Exists, [key(1)]) == [Status.PENDING]
    write = {"keys": [key(1)], "payload": layers[0], "layer_begin": 0, "layer_end": 1}
    assert list(writer.ask(Write, **write)[0].statuses) == [OK]
    assert values_of(*reader.receive()) == [layers[0]]
    assert store.delta(before, metrics.LAYERS_READ_BEFORE_SEAL_TOTAL) == 1
    write = {"keys": [key(1)], "payload": b"".join(layers[1:]), "layer_begin": 1, "layer_end": 4}
    assert list(writer.ask(Write, **write)[0].statuses) == [OK]
    assert values_of(*reader.receive()) == [b"".join(layers[1:])]
    assert reader.read([key(1)]) == [b"".join(layers)]


def test_a_waiting_read_does_not_hold_up_the_connection(store: StoreProcess) -> None:
    client = store.connect()
    waiting = client.send(Read, keys=[key(1)], wait_ms=60_000)
    quick = client.send(Exists, keys=[key(1)])
    reply, _ = client.receive()
    assert reply.id == quick
    assert store.connect().put([key(1)], [b"late"]) == [OK]
    reply, payload = client.receive()
    assert reply.id == waiting and payload == b"late"


def test_a_wait_ends_by_time_and_by_abort(store: StoreProcess) -> None:
    reader, writer = store.connect(), store.connect()
    assert reader.statuses(Await, [key(1)], layer_end=1, wait_ms=30) == [Status.TIMED_OUT]
    reader.send(Await, keys=[key(1)], layer_end=1, wait_ms=60_000)
    # The abort may come before the wait is known, so it is said until it is heard.
    reader.sock.settimeout(0.2)
    while True:
        assert writer.statuses(Abort, [key(1)]) == [OK]
        try:
            reply, _ = reader.receive()
            break
        except TimeoutError:
            continue
    assert list(reply.statuses) == [Status.ABANDONED]


def test_answers_to_many_requests_sent_at_once_are_all_right(store: StoreProcess) -> None:
    client = store.connect()
    values = {key(number): os.urandom(20_000) for number in range(40)}
    assert set(client.put(list(values), list(values.values()))) == {OK}
    wanted = [random.Random(5).choice(list(values)) for _ in range(400)]
    ids = {client.send(Read, keys=[name]): name for name in wanted}
    for _ in wanted:
        reply, payload = client.receive()
        assert payload == values[ids.pop(reply.id)]


def test_checksums_are_kept_and_on_demand_verified(start_store: StartStore) -> None:
    client = start_store("--verify-on-write").connect()
    good, bad = os.urandom(5000), os.urandom(5000)
    sums = [xxhash.xxh3_64_intdigest(good), 12345]
    assert client.put([key(1), key(2)], [good, bad], checksums=sums) == [OK, Status.CORRUPT]
    reply, payload = client.ask(Read, keys=[key(1), key(2)])
    assert reply.checksums == [sums[0]] and payload == good
    assert list(reply.statuses) == [OK, Status.MISSING]


def test_checksums_may_follow_the_values(start_store: StartStore) -> None:
    client = start_store("--verify-on-write").connect()
    values = [os.urandom(300_000), os.urandom(5000), os.urandom(70)]
    sums = [xxhash.xxh3_64_intdigest(values[0]), 12345, xxhash.xxh3_64_intdigest(values[2])]
    payload = b"".join(values) + struct.pack("<3Q", *sums)
    keys, sizes = [key(1), key(2), key(3)], [len(value) for value in values]
    reply, _ = client.ask(Put, payload, keys=keys, sizes_bytes=sizes, sums_follow=True)
    assert list(reply.statuses) == [OK, Status.CORRUPT, OK]
    reply, found = client.ask(Read, keys=keys)
    assert reply.checksums == [sums[0], sums[2]] and found == values[0] + values[2]
    for payload, given in ((b"abc" + bytes(7), []), (b"abc" + bytes(8), [7])):
        refused, _ = client.ask(
            Put, payload, keys=[key(4)], sizes_bytes=[3], checksums=given, sums_follow=True
        )
        assert isinstance(refused, ErrorReply) and refused.code == ErrorCode.BAD_REQUEST
    assert client.statuses(Exists, [key(4)]) == [Status.MISSING]


def test_a_full_store_evicts_in_the_background_and_at_need(start_store: StartStore) -> None:
    store = start_store(pool_size="16mb")
    client = store.connect()
    for number in range(200):
        assert client.put([key(number)], [bytes([number]) * 200_000]) == [OK]
    assert client.read([key(199)]) == [bytes([199]) * 200_000]
    assert client.statuses(Exists, [key(0)]) == [Status.MISSING]
    stats = store.stats()
    assert stats[metrics.EVICTED_OBJECTS_TOTAL] > 100 and stats[metrics.RESERVE_FULL_TOTAL] == 0
    reply, _ = client.ask(Evict)
    assert 0 < reply.num_objects <= stats[metrics.OBJECTS], "some may just have gone in the background"
    stats = store.stats()
    assert stats[metrics.POOL_USED_BYTES] == 0 and stats[metrics.EVICTED_OBJECTS_TOTAL] == 200


def test_listing_and_stats_over_the_wire(store: StoreProcess) -> None:
    client = store.connect()
    keys = [key(number) for number in range(25)]
    client.put(keys, [b"x" * 100] * 25)
    seen, cursor = [], 0
    while True:
        reply, _ = client.ask(ListKeys, cursor=cursor, limit=10)
        seen += [info.key for info in reply.keys]
        cursor = reply.next_cursor
        if not cursor:
            break
    assert seen == keys
    reply, _ = client.ask(Stats)
    assert reply.values[metrics.OBJECTS] == 25 and reply.values[metrics.CONNECTIONS] == 1


def refused(client: RawClient, *args: object, **fields: object) -> str:
    reply, _ = client.ask(*args, **fields)  # type: ignore[arg-type]
    assert isinstance(reply, ErrorReply), reply
    return reply.message


def test_senseless_requests_are_explained_and_the_connection_goes_on(start_store: StartStore) -> None:
    client = start_store("--max-keys", "4").connect()
    assert "sizes add up to 3" in refused(client, Put, b"four", keys=[key(1)], sizes_bytes=[3])
    assert "sizes add up to 4" in refused(client, Put, b"12", keys=[key(1), key(2)], sizes_bytes=[-2, 6])
    assert "allowed are 4" in refused(client, Exists, keys=[key(number) for number in range(5)])
    assert "no payload" in refused(client, Exists, b"payload", keys=[key(1)])
    assert "no layers" in refused(client, Commit, keys=[key(1)], layer_begin=1, layer_end=1)
    assert client.put([key(1)], [b"fine"]) == [OK]


def test_shared_memory_is_offered_to_this_host_only(start_store: StartStore) -> None:
    store = start_store()
    client = store.connect(greet=False)
    reply = client.hello(planes=["shm", "tcp"], host_id=host_id())
    assert reply.planes == ["shm", "tcp"] and reply.shm.pool_size_bytes == 64 * MIB
    reply = store.connect(greet=False).hello(planes=["rdma", "shm", "tcp"], host_id="elsewhere")
    assert reply.planes == ["tcp"] and reply.shm is None
    reply = start_store("--planes", "tcp").connect(greet=False).hello(planes=["shm"], host_id=host_id())
    assert reply.planes == [] and reply.shm is None
