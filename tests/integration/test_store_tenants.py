"""Tenants of a real store: they cannot see, reach or push out each other's objects."""

import json
from pathlib import Path

import pytest

from kvcore import metrics
from kvcore.client.sync_client import StoreClient
from kvcore.errors import RequestRefused
from kvcore.wire.messages import (
    Acquire,
    AcquireReply,
    Await,
    Commit,
    Describe,
    Drain,
    ErrorCode,
    ErrorReply,
    Evict,
    Exists,
    ListKeys,
    ListKeysReply,
    Lookup,
    Pin,
    Remove,
    Reserve,
    Stats,
    Status,
    Tier,
    Unpin,
    Verify,
)
from store_server.cli import main
from tests.integration.store_harness import MIB, RawClient, StartStore, eventually
from tests.integration.store_harness import short_dir as short_dir
from tests.integration.store_harness import start_store as start_store
from tests.integration.test_store_ssd import key, levels, value

OK, MISSING = Status.OK, Status.MISSING
TENANTS = [
    {"name": "a", "token": "token-of-a", "dram_quota": "8mb", "ssd_quota": "16mb"},
    {"name": "b", "token": "token-of-b"},
    {"name": "trusted", "token": "token-of-c", "shm": True},
]
FLAGS = ("--token", "of-the-operator", "--tenants", json.dumps(TENANTS))


def test_the_same_key_is_another_object_for_everybody(start_store: StartStore) -> None:
    store = start_store(*FLAGS)
    a, b = store.connect(token="token-of-a"), store.connect(token="token-of-b")
    operator = store.connect(token="of-the-operator")
    names = [key(1), key(2)]
    assert a.put(names, [b"of a", b"2"]) == [OK, OK]
    assert b.statuses(Exists, names) == [MISSING] * 2
    assert b.put(names[:1], [b"of b"]) == [OK]
    assert (a.read(names[:1]), b.read(names)) == ([b"of a"], [b"of b", MISSING])
    for kind in (Remove, Pin, Unpin):
        assert b.statuses(kind, names[1:]) == [MISSING]
    assert b.ask(Lookup, keys=names)[0].num_hits == 1
    assert b.statuses(Await, names[1:], layer_end=1, wait_ms=1) == [Status.TIMED_OUT]
    grants, _ = b.ask(Acquire, keys=names[1:], lease_ms=1000)
    assert isinstance(grants, AcquireReply) and grants.grants[0].status == MISSING

    infos = b.ask(Describe, keys=names)[0].infos
    assert [(info.key, info.size_bytes, info.tier) for info in infos] == [
        (names[0], 4, Tier.DRAM),
        (names[1], 0, Tier.NONE),
    ]
    assert listed(a) == sorted(names) and listed(b) == names[:1]
    assert len(listed(operator)) == 3 and not set(names) & set(listed(operator))
    assert b.statuses(Remove, names[:1]) == [OK]
    assert a.read(names) == [b"of a", b"2"]

    freed, _ = b.ask(Evict)
    assert freed.num_objects == 0
    freed, _ = a.ask(Evict)
    assert freed.num_objects == 2 and store.stats()[metrics.OBJECTS] == 0


def listed(client: RawClient) -> list[bytes]:
    reply, _ = client.ask(ListKeys)
    assert isinstance(reply, ListKeysReply)
    return sorted(info.key for info in reply.keys)


def test_layers_and_reservations_are_a_tenants_own(start_store: StartStore) -> None:
    store = start_store(*FLAGS)
    a, b = store.connect(token="token-of-a"), store.connect(token="token-of-b")
    for client in (a, b):
        reply, _ = client.ask(
            Reserve, keys=[key(1), key(2)], sizes_bytes=[8], num_layers=2, parents=[b"", key(1)]
        )
        assert [grant.status for grant in reply.grants] == [OK, OK]
    assert a.statuses(Commit, [key(1), key(2)], layer_begin=0, layer_end=2) == [OK, OK]
    assert b.statuses(Exists, [key(1)]) == [Status.PENDING] and a.statuses(Exists, [key(1)]) == [OK]


def test_nobody_comes_in_without_a_token_of_the_store(start_store: StartStore) -> None:
    for flags in (FLAGS, FLAGS[2:]):  # also when the operator has none
        store = start_store(*flags)
        for token in ("", "guess"):
            reply = store.connect(greet=False).hello(token=token)
            assert isinstance(reply, ErrorReply) and reply.code == ErrorCode.BAD_TOKEN
        store.connect(token="token-of-b")


def test_what_is_the_operators_is_refused_to_tenants(start_store: StartStore) -> None:
    store = start_store(*FLAGS)
    a = store.connect(token="token-of-a")
    for kind, fields in ((Drain, {"stop": True}), (Verify, {"start": True})):
        reply, _ = a.ask(kind, **fields)
        assert isinstance(reply, ErrorReply) and reply.code == ErrorCode.FORBIDDEN
    a.put([key(1)], [bytes(100_000)])
    values = a.ask(Stats)[0].values
    assert values[metrics.POOL_SIZE_BYTES] == 8 * MIB and values[metrics.OBJECTS] == 1
    assert values[metrics.POOL_USED_BYTES] > 100_000 and metrics.CONNECTIONS not in values
    address = ("--address", store.ready["address"])
    for arguments in (["stats"], ["top", "--count", "1", "--interval", "0.01"], ["ls"]):
        assert main([*arguments, *address, "--token", "token-of-a"]) == 0
    assert main(["drain", *address, "--token", "token-of-a"]) == 1
    text = store.http("/metrics")
    assert 'mooncake_store_tenant_pool_used_bytes{tenant="a"}' in text
    assert 'mooncake_store_tenant_objects{tenant="b"} 0.0' in text


def test_shared_memory_is_for_the_trusted(start_store: StartStore) -> None:
    store = start_store(*FLAGS)
    for token, plane in (("token-of-a", "tcp"), ("token-of-c", "shm"), ("of-the-operator", "shm")):
        with StoreClient.connect(store.ready["address"], token=token) as client:
            assert client.plane is not None and client.plane.name == plane
            assert client.put("name", b"value") is OK and client.get("name") == b"value"
    with pytest.raises(RequestRefused):
        StoreClient.connect(store.ready["address"], token="nobody's")


def test_quotas_of_dram_and_ssd(start_store: StartStore, short_dir: Path) -> None:
    flags = (*levels(short_dir / "ssd"), *FLAGS)
    store = start_store(*flags, pool_size="32mb")
    a, b = store.connect(token="token-of-a"), store.connect(token="token-of-b")
    for number in range(40):  # 10 MiB
        assert b.put([key(number)], [value(number)]) == [OK]
    for number in range(160):  # 40 MiB, of which 8 + 16 may stay
        assert a.put([key(number)], [value(number)]) == [OK]
    eventually(lambda: store.stats()["ssd_queued_bytes"] == 0)
    used = a.ask(Stats)[0].values
    assert used[metrics.POOL_USED_BYTES] <= 8 * MIB and 0 < used["ssd_live_bytes"] <= 16 * MIB
    assert b.read([key(number) for number in range(40)]) == [value(number) for number in range(40)]
    kept = [number for number in range(160) if a.statuses(Exists, [key(number)]) == [OK]]
    assert 60 <= len(kept) <= 96 and kept == list(range(kept[0], 160)), "the oldest have gone"
    assert a.read([key(kept[0])]) == [value(kept[0])]
    assert store.stop() == 0

    again = start_store(*flags, pool_size="32mb")
    a, b = again.connect(token="token-of-a"), again.connect(token="token-of-b")
    assert 0 < a.ask(Stats)[0].values["ssd_live_bytes"] <= 16 * MIB
    assert b.read([key(39)]) == [value(39)]
    assert a.read([key(159)]) == [value(159)]
    assert again.connect(token="of-the-operator").statuses(Exists, [key(39)]) == [MISSING]


def test_quotas_of_the_remote(start_store: StartStore, short_dir: Path) -> None:
    tenants = [
        {"name": "a", "token": "token-of-a", "dram_quota": "4mb", "remote_quota": "8mb"},
        {"name": "b", "token": "token-of-b"},
    ]
    remote = {"level": "remote", "url": f"file://{short_dir}/remote", "refresh": "200ms"}
    ssd = {"level": "ssd", "paths": [str(short_dir / "ssd")], "capacity": "256mb"}
    flags = ("--storage-levels", json.dumps([ssd, remote]), "--tenants", json.dumps(tenants))
    store = start_store(*flags, pool_size="16mb")
    a, b = store.connect(token="token-of-a"), store.connect(token="token-of-b")
    for number in range(24):  # 6 MiB
        assert b.put([key(number)], [value(number)]) == [OK]
    for number in range(64):  # 16 MiB, of which 8 may stay on the remote
        assert a.put([key(number)], [value(number)]) == [OK]
    for client in (a, b):
        client.ask(Evict)

    def is_settled() -> bool:
        stats = store.stats()
        pending = stats["ssd_queued_bytes"] + stats[metrics.REMOTE_COPIES_PENDING]
        return not (pending or stats["remote_in_flight_bytes"] or stats["remote_deletions_pending"])

    eventually(is_settled)
    used = a.ask(Stats)[0].values
    assert used["remote_live_bytes"] == used["remote_capacity_bytes"] == 8 * MIB
    assert used["remote_objects"] == 32 and "ssd_live_bytes" not in used
    written = store.stats()["remote_written_objects_total"]
    listings = store.stats()["remote_listings_total"]
    eventually(lambda: store.stats()["remote_listings_total"] >= listings + 2)
    eventually(is_settled)
    assert store.stats()["remote_written_objects_total"] == written, "what left does not come back"
    assert 'mooncake_store_tenant_remote_live_bytes{tenant="a"} 8.388608e+06' in store.http("/metrics")
    assert store.stop() == 0

    again = start_store(flags[0], json.dumps([remote]), *flags[2:], pool_size="16mb")
    a, b = again.connect(token="token-of-a"), again.connect(token="token-of-b")
    eventually(lambda: b.statuses(Exists, [key(number) for number in range(24)]) == [OK] * 24)
    eventually(lambda: again.stats()["remote_listings_total"] >= 1)
    kept = [number for number in range(64) if a.statuses(Exists, [key(number)]) == [OK]]
    assert len(kept) == 32 and a.ask(Stats)[0].values["remote_live_bytes"] == 8 * MIB
    assert a.read([key(kept[0])]) == [value(kept[0])]
