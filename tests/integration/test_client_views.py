"""get_view: bytes in the store's own memory, which stay what they are while a lease holds."""

import gc
import multiprocessing
import os
import time

import numpy as np
import pytest

from kvcore import metrics
from kvcore.client.sync_client import StoreClient
from kvcore.wire.messages import Status
from tests.integration.store_process import PATIENT, StoreProcess

SIZE = 1 << 20
PLANES = [("tcp",), ("shm",)]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    store = StoreProcess(tmp_path_factory.mktemp("views"), pool="64mb").start()
    yield store
    store.stop()


def stats_become(client: StoreClient, name: str, value: float) -> None:
    deadline = time.monotonic() + 30
    while client.stats()[name] != value:
        assert time.monotonic() < deadline, f"{name} is {client.stats()[name]}, not {value}"
        time.sleep(0.01)


@pytest.mark.parametrize("planes", PLANES)
@pytest.mark.parametrize("size_bytes", [1, SIZE])
def test_a_view_is_the_value_and_cannot_be_written(store, planes, size_bytes):
    value, name = os.urandom(size_bytes), f"whole {planes} {size_bytes}"
    with StoreClient.connect(store.address, planes=planes, **PATIENT) as client:
        assert client.put(name, value) is Status.OK
        with client.get_view(name) as view:
            assert b"".join(view.views) == value and view.size_bytes == size_bytes
            assert all(piece.readonly for piece in view.views) and view.renew() and view.still_valid()
        assert view.views == []
        view.close()
        counters = client.counters()
        assert counters["hits_total"] == 1 and counters["read_bytes_total"] == size_bytes


@pytest.mark.parametrize("planes", PLANES)
def test_a_miss_is_none(store, planes):
    with StoreClient.connect(store.address, planes=planes, **PATIENT) as client:
        assert client.get_view("nobody put this") is None
        assert client.counters()["misses_total"] == 1


def test_what_is_viewed_is_not_evicted_before_the_view_ends(store):
    with StoreClient.connect(store.address, planes=("shm",), **PATIENT) as client:
        value = os.urandom(SIZE)
        assert client.put("held", value) is Status.OK
        with client.get_view("held") as view:
            client.evict()
            for number in range(200):
                client.put(f"filler {number}", bytes([number]) * SIZE)
            assert np.array_equal(
                np.concatenate([np.frombuffer(v, np.uint8) for v in view.views]),
                np.frombuffer(value, np.uint8),
            )
            assert view.still_valid()
        stats_become(client, metrics.LEASES, 0)
        client.evict()
        assert not client.exists("held")


def test_a_forgotten_view_gives_its_lease_back(store):
    with StoreClient.connect(store.address, planes=("shm",), **PATIENT) as client:
        assert client.put("forgotten", bytes(SIZE)) is Status.OK
        view = client.get_view("forgotten")
        stats_become(client, metrics.LEASES, 1)
        del view
        gc.collect()
        stats_become(client, metrics.LEASES, 0)


def test_a_lease_that_is_over_is_known_to_be(tmp_path):
    store = StoreProcess(tmp_path / "short", "--default-lease-ms", "200", pool="64mb").start()
    try:
        with StoreClient.connect(store.address, planes=("shm",), **PATIENT) as client:
            assert client.put("short", bytes(SIZE)) is Status.OK
            with client.get_view("short") as view:
                time.sleep(0.3)
                assert not view.still_valid() and not view.renew()
    finally:
        store.stop()


def test_a_view_of_a_store_that_went_is_not_valid(tmp_path):
    store = StoreProcess(tmp_path / "gone", pool="64mb").start()
    try:
        with StoreClient.connect(store.address, planes=("shm",), **PATIENT) as client:
            assert client.put("gone", bytes(SIZE)) is Status.OK
            with client.get_view("gone") as view:
                store.kill()
                assert not view.still_valid() and not view.renew()
                assert bytes(view.views[0]) == bytes(SIZE)
            assert client.get_view("gone") is None
    finally:
        store.stop()


def test_a_view_outlives_its_client(store):
    client = StoreClient.connect(store.address, planes=("shm",), **PATIENT)
    assert client.put("outlived", bytes(SIZE)) is Status.OK
    view = client.get_view("outlived")
    client.close()
    assert not view.still_valid() and bytes(view.views[0]) == bytes(SIZE)
    view.close()


def test_a_forked_child_does_not_end_the_lease_of_its_parent(store):
    with StoreClient.connect(store.address, planes=("shm",), **PATIENT) as client:
        assert client.put("forked", bytes(SIZE)) is Status.OK
        view = client.get_view("forked")
        child = multiprocessing.get_context("fork").Process(target=view.close)
        child.start()
        child.join()
        assert child.exitcode == 0 and view.still_valid()
        stats_become(client, metrics.LEASES, 1)
        view.close()
