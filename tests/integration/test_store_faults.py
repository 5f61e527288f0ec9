"""Clients that lie, vanish, stall or hold on; and stores that are stopped or killed."""

import contextlib
import mmap
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from kvcore import metrics
from kvcore.transport.host import host_id
from kvcore.wire.codec import FRAME_HEADER, encode_frame, sealed
from kvcore.wire.messages import (
    Acquire,
    Await,
    Commit,
    ErrorCode,
    ErrorReply,
    Exists,
    HelloReply,
    Put,
    Read,
    Release,
    Remove,
    Reserve,
    Status,
    Write,
)
from tests.integration.store_harness import MIB, RawClient, StartStore, StoreProcess, eventually, values_of
from tests.integration.store_harness import shared_store as shared_store
from tests.integration.store_harness import short_dir as short_dir
from tests.integration.store_harness import start_store as start_store
from tests.integration.store_harness import store as store

OK = Status.OK


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


# ---- the session -------------------------------------------------------------------------------------------


def test_hello_must_come_first(store: StoreProcess) -> None:
    client = store.connect(greet=False)
    reply, _ = client.ask(Exists, keys=[key(1)])
    assert isinstance(reply, ErrorReply) and reply.code == ErrorCode.BAD_REQUEST
    assert client.is_closed()
    assert store.connect().put([key(1)], [b"fine"]) == [OK]


def test_a_wrong_token_or_version_is_refused_and_closed(start_store: StartStore) -> None:
    store = start_store("--token", "secret")
    for fields, code in (
        ({"token": "wrong"}, ErrorCode.BAD_TOKEN),
        ({"token": ""}, ErrorCode.BAD_TOKEN),
        ({"token": "secret", "version": 99}, ErrorCode.VERSION),
    ):
        client = store.connect(greet=False)
        reply = client.hello(**fields)
        assert isinstance(reply, ErrorReply) and reply.code == code
        assert client.is_closed()
    assert store.connect(token="secret").put([key(1)], [b"fine"]) == [OK]
    assert "secret" not in store.log.read_text()


def test_an_unknown_message_is_answered_and_its_payload_skipped(store: StoreProcess) -> None:
    client = store.connect()
    body = sealed(msgspec.msgpack.encode([99, 7, "from the future"]), 300_000)
    client.sock.sendall(FRAME_HEADER.pack(len(body), 300_000) + body + bytes(300_000))
    reply, _ = client.receive()
    assert isinstance(reply, ErrorReply) and (reply.id, reply.code) == (7, ErrorCode.UNKNOWN_MESSAGE)
    assert client.put([key(1)], [b"fine"]) == [OK]


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: store\r\n\r\n",
        b"\x00" * 64,
        b"\xff" * 64,
        FRAME_HEADER.pack(5, 0) + b"\xc1" * 5,
        FRAME_HEADER.pack(13, 0) + sealed(b"\xc1" * 5, 0),
        FRAME_HEADER.pack(3, 1 << 62) + b"\x93\x01\x02",
    ],
)
def test_garbage_closes_that_connection_only(store: StoreProcess, garbage: bytes) -> None:
    before = store.stats()
    other, client = store.connect(), store.connect()
    client.sock.sendall(garbage)
    assert client.is_closed()
    assert other.put([key(1)], [b"fine"]) == [OK]
    assert store.delta(before, metrics.PROTOCOL_ERRORS_TOTAL) == 1


def test_more_clients_than_allowed_are_turned_away_with_a_reason(start_store: StartStore) -> None:
    store = start_store("--max-connections", "2")
    first, _second = store.connect(), store.connect()
    third = store.connect(greet=False)
    reply, _ = third.receive()
    assert isinstance(reply, ErrorReply) and reply.code == ErrorCode.OVER_LIMIT and reply.retryable
    assert third.is_closed()
    first.close()
    eventually(lambda: store.stats()[metrics.CONNECTIONS] == 1)
    assert store.connect().put([key(1)], [b"fine"]) == [OK]


def test_who_says_nothing_is_cut_off(start_store: StartStore) -> None:
    store = start_store("--hello-timeout-ms", "2s")
    silent, client = store.connect(greet=False), store.connect()
    assert silent.is_closed()
    assert client.put([key(1)], [b"fine"]) == [OK]


def test_an_answer_over_the_limit_says_what_to_do(start_store: StartStore) -> None:
    client = start_store("--max-payload-bytes", "1mb").connect()
    for number in range(3):
        assert client.put([key(number)], [bytes(600_000)]) == [OK]
    reply, _ = client.ask(Read, keys=[key(0), key(1)])
    assert isinstance(reply, ErrorReply) and "fewer keys" in reply.message
    assert client.read([key(2)]) == [bytes(600_000)]


# ---- writers -----------------------------------------------------------------------------------------------


def cut_off(client: RawClient) -> None:
    """As when a process is killed with bytes under way: a reset, not an orderly end."""
    client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def test_a_writer_killed_in_the_middle_leaves_nothing_visible(store: StoreProcess) -> None:
    before = store.stats()
    reader = store.connect()
    for number in range(20):
        writer = store.connect()
        value = os.urandom(2 * MIB)
        frame = encode_frame(Put(1, [key(number)], [len(value)]), len(value))
        writer.sock.sendall(frame + value[: number * MIB // 10])
        eventually(lambda number=number: reader.statuses(Exists, [key(number)]) == [Status.PENDING])
        cut_off(writer)
        eventually(lambda number=number: reader.statuses(Exists, [key(number)]) == [Status.MISSING])
    stats = store.stats()
    assert stats[metrics.POOL_USED_BYTES] == stats[metrics.OBJECTS_PENDING] == 0
    assert store.delta(before, metrics.OBJECTS_ABANDONED_TOTAL) == 20


def test_a_reader_that_waits_learns_that_the_writer_vanished(store: StoreProcess) -> None:
    writer, reader = store.connect(), store.connect()
    writer.ask(Reserve, keys=[key(1)], sizes_bytes=[4000], num_layers=2)
    reader.send(Read, keys=[key(1)], wait_ms=60_000)
    cut_off(writer)
    assert values_of(*reader.receive()) == [Status.ABANDONED]


def test_a_writer_that_stalls_loses_its_reservation_and_may_go_on(start_store: StartStore) -> None:
    store = start_store("--reservation-timeout-ms", "200")
    writer, other = store.connect(), store.connect()
    writer.ask(Reserve, keys=[key(1)], sizes_bytes=[4000], num_layers=2)
    assert other.statuses(Await, [key(1)], layer_end=1, wait_ms=60_000) == [Status.ABANDONED]
    assert other.put([key(1)], [b"mine" * 1000]) == [OK]
    write = {"keys": [key(1)], "payload": bytes(2000), "layer_begin": 0, "layer_end": 1}
    assert list(writer.ask(Write, **write)[0].statuses) == [Status.INVALID]
    assert writer.read([key(1)]) == [b"mine" * 1000]


# ---- readers -----------------------------------------------------------------------------------------------


def test_a_slow_reader_never_sees_reused_bytes(start_store: StartStore) -> None:
    store = start_store(pool_size="32mb")
    reader, writer = store.connect(), store.connect()
    values = {key(number): bytes([number]) * (3 * MIB) for number in range(5)}
    assert set(writer.put(list(values), list(values.values()))) == {OK}
    names = list(values) * 2
    for name in names:
        reader.send(Read, keys=[name])
    # The sockets' buffers cannot hold all this: most of it still lies in the pool when others want its room.
    eventually(lambda: store.stats()[metrics.READ_BYTES_TOTAL] == sum(map(len, values.values())) * 2)
    assert set(writer.statuses(Remove, list(values), force=True)) == {OK}
    for number in range(100, 160):
        assert writer.put([key(number)], [b"\xff" * MIB]) in ([OK], [Status.FULL])
    for name in names:
        reply, payload = reader.receive()
        assert list(reply.statuses) == [OK]
        assert payload == values[name]


def test_a_reader_that_takes_nothing_is_cut_off_and_its_bytes_are_freed(start_store: StartStore) -> None:
    store = start_store("--send-timeout-ms", "300")
    reader, other = store.connect(), store.connect()
    value = os.urandom(16 * MIB)
    assert other.put([key(1)], [value]) == [OK]
    for _ in range(4):
        reader.send(Read, keys=[key(1)])
    eventually(lambda: store.stats()[metrics.CONNECTIONS] == 1)
    assert other.statuses(Remove, [key(1)]) == [OK]
    eventually(lambda: store.stats()[metrics.POOL_USED_BYTES] == 0)


def test_requests_of_a_client_that_takes_no_answers_have_to_wait(start_store: StartStore) -> None:
    store = start_store("--max-unsent-bytes", "1mb")
    client, other = store.connect(), store.connect()
    value = os.urandom(4 * MIB)
    assert other.put([key(1)], [value]) == [OK]
    served = store.stats()[metrics.READ_BYTES_TOTAL]
    num_reads = 200
    client.sock.setblocking(False)
    frames = b"".join(
        # A long unknown key makes the requests larger than what the store takes in at once.
        encode_frame(Read(number + 1, [key(1), b"k" * 60_000]))
        for number in range(num_reads)
    )
    sent = 0
    deadline = time.monotonic() + 2.0
    while sent < len(frames) and time.monotonic() < deadline:
        with contextlib.suppress(BlockingIOError):
            sent += client.sock.send(frames[sent : sent + 65_536])
    eventually(lambda: store.stats()[metrics.READ_BYTES_TOTAL] > served)
    taken = store.stats()[metrics.READ_BYTES_TOTAL] - served
    assert taken < num_reads * len(value) / 2, "the store answered into the void"
    client.sock.settimeout(60)
    whole = (len(frames) // num_reads) * (sent // (len(frames) // num_reads))
    for number in range(whole // (len(frames) // num_reads)):
        reply, payload = client.receive()
        assert reply.id == number + 1 and payload == value


# ---- shared memory -----------------------------------------------------------------------------------------


class Mapped:
    """A client that has mapped the pool."""

    def __init__(self, store: StoreProcess) -> None:
        self.client = store.connect(greet=False)
        reply = self.client.hello(planes=["shm"], host_id=host_id())
        assert isinstance(reply, HelloReply) and reply.shm is not None
        self.attachment = socket.socket(socket.AF_UNIX)
        self.attachment.settimeout(60)
        self.attachment.connect(reply.shm.attach_path)
        self.attachment.sendall(reply.shm.nonce)
        _, (descriptor,), _, _ = socket.recv_fds(self.attachment, 1, 1)
        self.pool = mmap.mmap(descriptor, reply.shm.pool_size_bytes)
        self.descriptor = descriptor

    def unmap(self) -> None:
        self.pool.close()
        os.close(self.descriptor)
        self.attachment.close()


def test_bytes_written_through_shared_memory_are_what_tcp_readers_get(store: StoreProcess) -> None:
    writer, reader = Mapped(store), store.connect()
    value = os.urandom(50_000)
    reply, _ = writer.client.ask(Reserve, keys=[key(1)], sizes_bytes=[50_000], num_layers=2)
    offset, size = reply.grants[0].extents
    assert size == 50_000
    writer.pool[offset : offset + size] = value
    assert writer.client.statuses(Commit, [key(1)], layer_begin=0, layer_end=2) == [OK]
    assert reader.read([key(1)]) == [value]
    reply, _ = writer.client.ask(Acquire, keys=[key(1)], lease_ms=60_000)
    offset, size = reply.grants[0].extents
    assert writer.pool[offset : offset + size] == value
    assert reader.statuses(Remove, [key(1)]) == [Status.LEASED]
    writer.client.ask(Release, lease=reply.lease)
    assert reader.statuses(Remove, [key(1)]) == [OK]
    writer.unmap()


def test_what_a_vanished_client_may_still_write_to_is_not_reused(store: StoreProcess) -> None:
    writer, other = Mapped(store), store.connect()
    reply, _ = writer.client.ask(Reserve, keys=[key(1)], sizes_bytes=[4096])
    offset = reply.grants[0].extents[0]
    writer.client.close()
    eventually(lambda: store.stats()[metrics.QUARANTINED_BYTES] == 4096)
    value = os.urandom(4096)
    assert other.put([key(1)], [value]) == [OK]
    writer.pool[offset : offset + 4096] = b"\xff" * 4096
    assert other.read([key(1)]) == [value], "a late write reached another object"
    writer.unmap()
    eventually(lambda: store.stats()[metrics.QUARANTINED_BYTES] == 0)


def test_the_pool_cannot_be_resized_or_had_without_a_nonce(store: StoreProcess) -> None:
    mapped = Mapped(store)
    with pytest.raises(PermissionError):
        os.ftruncate(mapped.descriptor, 0)
    path = store.connect(greet=False).hello(planes=["shm"], host_id=host_id()).shm.attach_path
    assert Path(path).parent.stat().st_mode & 0o777 == 0o700
    for wrong in (b"x" * 16, b"short", b""):
        stranger = socket.socket(socket.AF_UNIX)
        stranger.settimeout(60)
        stranger.connect(path)
        stranger.sendall(wrong)
        if not wrong:
            stranger.shutdown(socket.SHUT_WR)
        assert stranger.recv(1) == b""
        stranger.close()
    mapped.unmap()


# ---- the process -------------------------------------------------------------------------------------------


def test_sigterm_ends_it_gracefully_and_leaves_nothing(start_store: StartStore, short_dir: Path) -> None:
    store = start_store()
    client = store.connect()
    assert client.put([key(1)], [b"x"]) == [OK]
    client.send(Read, keys=[key(2)], wait_ms=60_000)
    assert store.stop(signal.SIGTERM) == 0
    assert sorted(path.name for path in short_dir.iterdir()) == ["store.log"]


def test_what_a_killed_store_leaves_the_next_one_removes(start_store: StartStore, short_dir: Path) -> None:
    living, killed = start_store(), start_store()
    killed.stop(signal.SIGKILL)
    assert len(list(short_dir.glob("mooncake-store-*"))) == 2
    start_store()
    left = set(short_dir.glob("mooncake-store-*"))
    assert len(left) == 2
    assert Path(living.ready["unix_address"].removeprefix("unix://")).parent in left


def test_admin_answers_in_the_usual_forms(start_store: StartStore) -> None:
    store = start_store()
    store.connect().put([key(1)], [bytes(1000)])
    assert '"ok"' in store.http("/health") and '"ready"' in store.http("/ready")
    text = store.http("/metrics")
    assert re.search(r"^mooncake_store_objects 1\.0$", text, re.M)
    assert re.search(r"^# TYPE mooncake_store_written_bytes_total counter$", text, re.M)
    assert re.search(r"^mooncake_store_written_bytes_total 1000\.0$", text, re.M)
    assert re.search(r'^mooncake_store_requests_total\{type="Put"\} 1\.0$', text, re.M)
    assert re.search(r'^mooncake_store_requests_total\{type="Hello"\} 1\.0$', text, re.M)
    assert re.search(r"^process_resident_memory_bytes ", text, re.M)
    assert store.stats()[metrics.WRITTEN_BYTES_TOTAL] == 1000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--pool-size", "900tb"], "smaller --pool-size"),
        (["--port", "1", "--host", "203.0.113.7"], "cannot listen"),
    ],
)
def test_what_this_machine_cannot_do_is_explained(flags: list[str], complaint: str) -> None:
    command = [sys.executable, "-m", "store_server.cli", "serve", "--admin-port", "-1", "--port", "0"]
    result = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode in (1, 2)
    assert complaint in result.stderr
    assert "Traceback" not in result.stderr
