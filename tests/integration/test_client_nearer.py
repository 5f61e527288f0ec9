"""A client on the store's own host leaves TCP for the store's Unix socket, where it can."""

import os
import socket
import time
from pathlib import Path

import pytest

from kvcore import metrics
from kvcore.client.sync_client import StoreClient
from kvcore.wire.messages import Status
from tests.integration.store_process import StoreProcess


@pytest.fixture
def store(tmp_path):
    store = StoreProcess(tmp_path / "store", "--unix-path", str(tmp_path / "s.sock"), pool="64mb")
    yield store.start()
    store.stop()


def families_to(store: StoreProcess) -> list[socket.AddressFamily]:
    """Of this process's connections to the store, without the one that stands for the mapping."""
    port, found = int(store.address.rpartition(":")[2]), []
    for link in Path("/proc/self/fd").iterdir():
        try:
            if not str(link.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(link.name))) as sock:
                peer = sock.getpeername()
        except OSError:
            continue
        is_tcp = isinstance(peer, tuple) and peer[1] == port
        if is_tcp or (isinstance(peer, str) and peer.endswith("s.sock")):
            found.append(sock.family)
    return found


def test_the_session_of_a_neighbour_is_on_the_unix_socket(store):
    with StoreClient.connect(store.address, planes=("shm", "tcp")) as client:
        assert client.put("near", bytes(300_000)) is Status.OK and client.get("near") == bytes(300_000)
        assert client.counters()["plane"] == "shm" and families_to(store) == [socket.AF_UNIX]
        deadline = time.monotonic() + 30
        while client.stats()[metrics.CONNECTIONS] != 1:
            assert time.monotonic() < deadline, "the connection over TCP is still there"
            time.sleep(0.01)


def test_who_wants_tcp_gets_it(store):
    with StoreClient.connect(store.address, planes=("tcp",)) as client:
        assert client.put("far", b"x") is Status.OK and families_to(store) == [socket.AF_INET]


def test_a_socket_that_is_not_there_costs_nothing_but_its_speed(store, tmp_path):
    (tmp_path / "s.sock").unlink()
    with StoreClient.connect(store.address, planes=("shm", "tcp")) as client:
        assert client.put("near", bytes(300_000)) is Status.OK and client.get("near") == bytes(300_000)
        assert client.counters()["plane"] == "shm" and families_to(store) == [socket.AF_INET]
