"""Copies on chosen levels, and eviction by strategy: the clients and a real store with three levels."""

import asyncio
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcore import metrics
from kvcore.client.async_client import AsyncStoreClient
from kvcore.client.sync_client import StoreClient
from kvcore.wire.messages import EvictStrategy, PinKind, Status, Tier
from tests.integration.store_harness import StartStore, StoreProcess, eventually, store_starter
from tests.integration.store_harness import short_dir as short_dir
from tests.integration.store_harness import start_store as start_store

OK, INVALID, MISSING = Status.OK, Status.INVALID, Status.MISSING
DRAM, SSD, REMOTE = Tier.DRAM, Tier.SSD, Tier.REMOTE
SIZE = 64 << 10
WAIT_MS = 60_000


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def value(number: int) -> bytes:
    return bytes([number + 1]) * SIZE


KEYS = [key(number) for number in range(8)]


@pytest.fixture(scope="module")
def three_levels() -> Iterator[StoreProcess]:
    with tempfile.TemporaryDirectory(prefix="mks-") as name, store_starter(Path(name)) as start:
        levels = [
            {"level": "ssd", "paths": [f"{name}/ssd"], "capacity": "64mb"},
            # A listing would have what is dropped there copied again.
            {"level": "remote", "url": f"file://{name}/remote", "refresh": "1h"},
        ]
        yield start("--storage-levels", json.dumps(levels), pool_size="16mb")


@pytest.fixture
def client(three_levels: StoreProcess) -> Iterator[StoreClient]:
    address = f"127.0.0.1:{three_levels.ready['port']}"
    with StoreClient.connect(address, timeout_ms=60_000) as client:
        put = client.batch_put_from(KEYS, [value(number) for number in range(len(KEYS))])
        assert put == [OK] * len(KEYS)
        yield client
        client.batch_unpin(KEYS)
        eventually(lambda: is_quiet(client))
        client.batch_remove(KEYS, force=True)


def copies(client: StoreClient, name: bytes) -> set[Tier]:
    (info,) = client.describe([name])
    return {Tier(tier) for tier in info.copies} if info is not None else set()


def is_quiet(client: StoreClient) -> bool:
    """Nothing is being copied on from the SSD, and so nothing in use."""
    stats = client.stats()
    return not stats[metrics.REMOTE_COPIES_PENDING] and not stats["remote_in_flight_bytes"]


def test_copies_are_added_and_dropped(client: StoreClient) -> None:
    assert copies(client, KEYS[0]) == {DRAM}
    assert client.change_replica(KEYS, add=REMOTE, wait_ms=WAIT_MS) == [OK] * 8
    assert all(copies(client, name) == {DRAM, REMOTE} for name in KEYS)
    assert client.change_replica(KEYS[:4], drop=DRAM) == [OK] * 4
    assert copies(client, KEYS[0]) == {REMOTE}
    # From the remote to the SSD the way leads through DRAM.
    assert client.prefetch(KEYS[:4], Tier.SSD).wait() == [OK] * 4
    assert copies(client, KEYS[0]) == {DRAM, SSD, REMOTE}
    assert client.change_replica(KEYS[:4], drop=REMOTE) == [OK] * 4
    assert copies(client, KEYS[0]) == {DRAM, SSD}
    assert [client.get(name) for name in KEYS] == [value(number) for number in range(8)]


def test_an_object_moves_in_one_call_and_back(client: StoreClient) -> None:
    assert client.change_replica(KEYS, add=SSD, drop=DRAM, wait_ms=WAIT_MS) == [OK] * 8
    assert all(copies(client, name) <= {SSD, REMOTE} for name in KEYS)  # the SSD is copied on by itself
    assert client.change_replica(KEYS, add=DRAM, wait_ms=WAIT_MS) == [OK] * 8
    assert all(DRAM in copies(client, name) for name in KEYS)
    assert [client.get(name) for name in KEYS] == [value(number) for number in range(8)]


def test_the_only_copy_stays(client: StoreClient) -> None:
    assert client.change_replica([*KEYS[:2], b"?" * 32], drop=DRAM) == [INVALID, INVALID, MISSING]
    assert client.change_replica(KEYS[:1], drop=SSD) == [OK]  # there is none
    assert client.get(KEYS[0]) == value(0)


def test_what_is_pinned_stays_in_dram(client: StoreClient) -> None:
    assert client.change_replica(KEYS[:1], add=SSD, wait_ms=WAIT_MS) == [OK]
    assert client.pin(KEYS[0], PinKind.HARD) is OK
    assert client.change_replica(KEYS[:1], drop=DRAM) == [Status.LEASED]
    assert client.unpin(KEYS[0]) is OK
    assert client.change_replica(KEYS[:1], drop=DRAM) == [OK]


def test_unknown_keys_and_tiers(client: StoreClient) -> None:
    assert client.change_replica([b"?" * 32], add=SSD, wait_ms=WAIT_MS) == [MISSING]
    assert client.change_replica(KEYS[:1], add=Tier.NONE) == [INVALID]
    assert client.change_replica([], add=SSD) == []


def test_not_waiting_the_copies_come_all_the_same(client: StoreClient, three_levels: StoreProcess) -> None:
    statuses = client.change_replica(KEYS, add=SSD)
    assert set(statuses) <= {OK, Status.PENDING}
    eventually(lambda: all(SSD in copies(client, name) for name in KEYS))
    assert three_levels.stats()[metrics.WAITERS] == 0


def test_a_copy_outlives_dram_at_once(client: StoreClient, three_levels: StoreProcess) -> None:
    assert client.change_replica(KEYS, add=REMOTE, wait_ms=WAIT_MS) == [OK] * 8
    assert client.batch_remove(KEYS[:1]) == [OK]
    assert copies(client, KEYS[0]) == set()
    assert client.get(KEYS[1]) == value(1)


def test_without_lower_levels_there_is_nothing_to_choose(start_store: StartStore) -> None:
    store = start_store(pool_size="16mb")
    with StoreClient.connect(f"127.0.0.1:{store.ready['port']}") as client:
        assert client.put(KEYS[0], value(0)) is OK
        assert client.change_replica(KEYS[:1], add=SSD) == [INVALID]
        assert client.change_replica(KEYS[:1], add=DRAM) == [OK]
        assert client.change_replica(KEYS[:1], drop=DRAM) == [INVALID]
        assert client.prefetch(KEYS[:2]).wait() == [OK, MISSING]
        assert client.evict(strategy=EvictStrategy.COPIES) == (0, 0)
        assert client.evict() == (1, SIZE)


def test_eviction_by_strategy(client: StoreClient) -> None:
    assert client.change_replica(KEYS[4:], add=SSD, wait_ms=WAIT_MS) == [OK] * 4
    eventually(lambda: is_quiet(client))
    assert client.evict(strategy=EvictStrategy.COPIES) == (4, 4 * SIZE)
    assert [DRAM in copies(client, name) for name in KEYS] == [True] * 4 + [False] * 4
    assert client.evict(strategy=EvictStrategy.DISCARD) == (4, 4 * SIZE)
    assert client.batch_exists(KEYS) == [False] * 4 + [True] * 4
    assert client.prefetch(KEYS).wait() == [MISSING] * 4 + [OK] * 4


def test_the_asyncio_client_does_the_same(client: StoreClient, three_levels: StoreProcess) -> None:
    async def work() -> None:
        address = f"127.0.0.1:{three_levels.ready['port']}"
        async with await AsyncStoreClient.connect(address, timeout_ms=60_000) as other:
            assert await other.prefetch(KEYS[:3], Tier.SSD) == [OK] * 3
            assert await other.change_replica(KEYS[:3], add=REMOTE, drop=DRAM, wait_ms=WAIT_MS) == [OK] * 3
            assert await other.prefetch(KEYS[:3]) == [OK] * 3
            assert (await other.evict(strategy=EvictStrategy.COPIES))[0] == 3

    asyncio.run(work())
