"""Malformed frames over real sockets: the store closes that one connection, and nothing else happens."""

import random
import socket
import struct
import threading

import pytest

from kvcore.client.sync_client import StoreClient
from kvcore.wire import messages as m
from kvcore.wire.codec import FRAME_HEADER, encode_frame, sealed
from kvcore.wire.messages import Status
from tests.integration.store_harness import eventually
from tests.integration.store_process import PATIENT, StoreProcess

KEYS = [bytes([number]) * 32 for number in range(3)]
REQUESTS: list[tuple[m.Message, bytes]] = [
    (m.Lookup(2, KEYS), b""),
    (m.Put(3, KEYS[:1], [20]), bytes(20)),
    (m.Reserve(4, KEYS, [3000], 3), b""),
    (m.Write(5, KEYS, 0, 1), bytes(3000)),
    (m.Read(6, KEYS, 0, 1, 5), b""),
    (m.Acquire(7, KEYS, 50), b""),
    (m.Release(8, 1), b""),
    (m.ListKeys(9), b""),
]
NUM_INPUTS = 4000


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    store = StoreProcess(tmp_path_factory.mktemp("fuzz"), pool="32mb").start()
    yield store
    assert store.stop() == 0


def malformed(rng: random.Random) -> bytes:
    """Some good frames, then bytes that are not."""
    good = b"".join(
        encode_frame(message, len(payload)) + payload for message, payload in rng.choices(REQUESTS, k=2)
    )
    kind = rng.randrange(6)
    if kind == 0:
        return good + FRAME_HEADER.pack(rng.choice([0, 1 << 31]), 0) + rng.randbytes(30)
    if kind == 1:
        return good + FRAME_HEADER.pack(10, rng.choice([1 << 40, 2**64 - 1])) + rng.randbytes(30)
    if kind == 2:
        return good[: rng.randrange(1, len(good))]
    if kind == 3:
        mutated = bytearray(good)
        for _ in range(rng.randint(1, 6)):
            mutated[rng.randrange(len(mutated))] = rng.randrange(256)
        return bytes(mutated)
    if kind == 4:
        payload_bytes = rng.randrange(100)
        body = sealed(rng.randbytes(rng.randint(1, 60)), payload_bytes)
        return good + struct.pack("<IQ", len(body), payload_bytes) + body + rng.randbytes(100)
    return rng.randbytes(rng.randint(1, 200))


def test_thousands_of_malformed_connections(store):
    rng = random.Random(7)
    hello = encode_frame(m.Hello(1, m.PROTOCOL_VERSION, "fuzz", ["tcp"]))
    stop, failures = threading.Event(), []
    with StoreClient.connect(store.address, planes=("tcp",), **PATIENT) as bystander:

        def bystand() -> None:
            number = 0
            while not stop.is_set():
                name = f"bystander {number}"
                if bystander.put(name, name.encode() * 50) != Status.OK or (
                    bystander.get(name) != name.encode() * 50
                ):
                    failures.append(name)
                bystander.remove(name)
                number += 1

        thread = threading.Thread(target=bystand)
        thread.start()
        for number in range(NUM_INPUTS):
            with socket.create_connection(("127.0.0.1", store.port), timeout=20) as sock:
                try:
                    sock.sendall((hello if number % 5 else b"") + malformed(rng))
                    if number % 20 == 0:
                        # Until the store has closed: it must not keep what it can not understand.
                        sock.shutdown(socket.SHUT_WR)
                        while sock.recv(1 << 16):
                            pass
                except (BrokenPipeError, ConnectionResetError):
                    pass
        stop.set()
        thread.join(60)
        assert failures == [] and bystander.connected
        assert bystander.counters()["connections_lost_total"] == 0
        stats = bystander.stats()
        assert stats["protocol_errors_total"] > NUM_INPUTS // 10


def test_what_the_fuzz_left_behind_is_given_back(store):
    with StoreClient.connect(store.address, planes=("tcp",), **PATIENT) as client:
        # The last connections of the test before may still be there, with what they have begun.
        eventually(lambda: client.stats()["connections"] == 1)
        for info in client.list_keys()[0]:
            client.remove(info.key, force=True)
        stats = client.stats()
        assert stats["objects_pending"] == 0 and stats["leases"] == 0
