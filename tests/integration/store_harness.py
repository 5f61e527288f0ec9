"""A real `mooncake-store` process and a client that speaks the wire by hand, so that it can misbehave."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvcore.metrics import CONNECTIONS, POOL_USED_BYTES
from kvcore.wire.codec import FRAME_HEADER, FRAME_HEADER_BYTES, encode_frame, reply_decoder
from kvcore.wire.messages import (
    PROTOCOL_VERSION,
    Evict,
    Hello,
    HelloReply,
    Message,
    Put,
    Read,
    ReadReply,
    Status,
    StatusReply,
)

DEADLINE_S = 60.0
MIB = 1 << 20


def eventually(condition: Callable[[], Any], deadline_s: float = DEADLINE_S) -> Any:
    """What `condition` returns as soon as it is true."""
    end = time.monotonic() + deadline_s
    while not (value := condition()):
        assert time.monotonic() < end, "this should have happened by now"
        time.sleep(0.01)
    return value


class RawClient:
    """One blocking socket. `next_id` counts the requests."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.next_id = 1
        self._decoder = reply_decoder()

    def hello(self, **fields: Any) -> Any:
        values = {"version": PROTOCOL_VERSION, "client_name": "test", "planes": ["tcp"], **fields}
        reply, _ = self.ask(Hello, **values)
        return reply

    def send(self, kind: type[Message], payload: bytes = b"", **fields: Any) -> int:
        request_id = self.next_id
        self.next_id += 1
        self.sock.sendall(encode_frame(kind(request_id, **fields), len(payload)) + payload)
        return request_id

    def receive(self) -> tuple[Any, bytes]:
        head = self.receive_exactly(FRAME_HEADER_BYTES)
        body_bytes, payload_bytes = FRAME_HEADER.unpack(head)
        frame = self._decoder.decode_body(self.receive_exactly(body_bytes), payload_bytes)
        return frame.message, self.receive_exactly(payload_bytes)

    def ask(self, kind: type[Message], payload: bytes = b"", **fields: Any) -> tuple[Any, bytes]:
        request_id = self.send(kind, payload, **fields)
        reply, answer = self.receive()
        assert reply.id == request_id
        return reply, answer

    def put(self, keys: Sequence[bytes], values: Sequence[bytes], **fields: Any) -> list[Status]:
        sizes = [len(value) for value in values]
        reply, _ = self.ask(Put, b"".join(values), keys=list(keys), sizes_bytes=sizes, **fields)
        assert isinstance(reply, StatusReply), reply
        return [Status(code) for code in reply.statuses]

    def read(self, keys: Sequence[bytes], **fields: Any) -> list[Status | bytes]:
        """The value of each key, or the status that says why there is none."""
        reply, payload = self.ask(Read, keys=list(keys), **fields)
        return values_of(reply, payload)

    def statuses(self, kind: type[Message], keys: Sequence[bytes], **fields: Any) -> list[Status]:
        reply, _ = self.ask(kind, keys=list(keys), **fields)
        assert isinstance(reply, StatusReply), reply
        return [Status(code) for code in reply.statuses]

    def is_closed(self) -> bool:
        """Waits for the end of the stream."""
        with contextlib.suppress(ConnectionError):
            while self.sock.recv(1 << 16):
                pass
        return True

    def receive_exactly(self, size: int) -> bytes:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            count = self.sock.recv_into(view)
            if not count:
                raise ConnectionError("the store closed the connection")
            view = view[count:]
        return bytes(data)

    def close(self) -> None:
        self.sock.close()


def values_of(reply: Any, payload: bytes) -> list[Status | bytes]:
    assert isinstance(reply, ReadReply), reply
    values: list[Status | bytes] = []
    for code, size in zip(reply.statuses, reply.sizes_bytes, strict=True):
        values.append(payload[:size] if code == Status.OK else Status(code))
        payload = payload[size:]
    assert not payload
    return values


class StoreProcess:
    """`mooncake-store serve` on free ports with `flags`; its sockets lie in `directory`."""

    def __init__(self, directory: Path, *flags: str, pool_size: str = "64mb") -> None:
        self.directory = directory
        ready_file = directory / "ready.json"
        ready_file.unlink(missing_ok=True)
        command = [sys.executable, "-m", "store_server.cli", "serve", "--port", "0", "--admin-port", "0"]
        command += ["--pool-size-bytes", pool_size, "--ready-file", str(ready_file), *flags]
        self.log = directory / "store.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env={**os.environ, "TMPDIR": str(directory), "PYTHONUNBUFFERED": "1"},
            )

        def is_ready() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            return ready_file.exists()

        try:
            eventually(is_ready)
        except BaseException:  # nobody else knows of it yet
            self.process.kill()
            self.process.wait()
            raise
        self.ready: dict[str, Any] = json.loads(ready_file.read_text())
        self._clients: list[RawClient] = []

    def connect(self, *, unix: bool = False, greet: bool = True, **hello: Any) -> RawClient:
        if unix:
            sock = socket.socket(socket.AF_UNIX)
            sock.settimeout(DEADLINE_S)
            sock.connect(self.ready["unix_address"].removeprefix("unix://"))
        else:
            sock = socket.create_connection((self.ready["host"], self.ready["port"]), DEADLINE_S)
        client = RawClient(sock)
        self._clients.append(client)
        if greet:
            assert isinstance(client.hello(**hello), HelloReply)
        return client

    def http(self, path: str) -> str:
        with urllib.request.urlopen(self.ready["admin_url"] + path, timeout=DEADLINE_S) as answer:
            return str(answer.read().decode())

    def stats(self) -> dict[str, float]:
        values: dict[str, float] = json.loads(self.http("/stats"))
        return values

    def delta(self, before: dict[str, float], name: str) -> float:
        return self.stats()[name] - before[name]

    def disconnect(self) -> None:
        for client in self._clients:
            client.close()
        self._clients.clear()

    def clean(self) -> None:
        """Forgets all objects and waits until all clients of an earlier test are gone."""
        eventually(lambda: self.stats()[CONNECTIONS] == 0)
        client = self.connect()
        client.ask(Evict)
        client.close()
        eventually(lambda: self.stats()[POOL_USED_BYTES] == 0 and self.stats()[CONNECTIONS] == 0)

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.disconnect()
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(DEADLINE_S)


StartStore = Callable[..., StoreProcess]


@contextlib.contextmanager
def store_starter(directory: Path) -> Iterator[StartStore]:
    started: list[StoreProcess] = []

    def start(*flags: str, **options: Any) -> StoreProcess:
        started.append(StoreProcess(directory, *flags, **options))
        return started[-1]

    try:
        yield start
    finally:
        for store in started:
            store.stop(signal.SIGKILL)


@pytest.fixture(scope="module")
def shared_store() -> Iterator[StoreProcess]:
    with tempfile.TemporaryDirectory(prefix="mks-") as name, store_starter(Path(name)) as start:
        yield start()


@pytest.fixture
def store(shared_store: StoreProcess) -> Iterator[StoreProcess]:
    """One store with default settings for a whole file of tests, empty at the start of each."""
    shared_store.clean()
    yield shared_store
    shared_store.disconnect()


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """Not tmp_path: the path of a Unix socket may have no more than 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="mks-") as name:
        yield Path(name)


@pytest.fixture
def start_store(short_dir: Path) -> Iterator[StartStore]:
    with store_starter(short_dir) as start:
        yield start
