"""The raw socket: the same questions and answers over loopback TCP with nothing of a store behind them.

One blocking thread a connection, one sendmsg or recv_into per value as far as the kernel allows, TCP_NODELAY,
Reno as our own connections within a host (else the two would differ by the system's congestion control), no
keys, no index, no checks: the client names offsets in its connection's arena. What a store over TCP could
reach at best with one connection.
"""

import mmap
import os
import socket
import struct
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from kvcore.transport.host import hurry_within_host
from storebench.clients import BENCHMARKS_DIR, ClientSpec
from storebench.driver import Bytes, touched
from storebench.plan import MAX_PHASE_BYTES, Cell
from storebench.processes import Process, accepts, free_port

# operation, offset in the arena (of the connection), payload bytes, bytes of keys
_REQUEST = struct.Struct("<BQQQ")
_PUT, _GET, _EXISTS = range(3)
_KEY_BYTES = 32


class RawTcp:
    name = "raw-tcp"
    about = "bare sockets, a blocking thread per connection, no store: what one TCP connection gives"

    def __init__(self) -> None:
        self._port = free_port()
        self._server: Process | None = None

    def start(self, work_dir: Path) -> None:
        self._server = Process(
            [sys.executable, "-m", "storebench.systems.raw_tcp", str(self._port)],
            work_dir / "raw-tcp-server.log",
            environment={"PYTHONPATH": str(BENCHMARKS_DIR)},
        )
        self._server.wait_until(lambda: accepts(self._port), 30, "raw socket server")

    def stop(self) -> None:
        if self._server:
            self._server.stop()

    @property
    def server_pids(self) -> list[int]:
        return [self._server.pid] if self._server else []

    def client(self) -> ClientSpec:
        return ClientSpec("storebench.systems.raw_tcp:RawTcpDriver", {"port": self._port})

    def measures(self, cell: Cell) -> bool:
        return True


class RawTcpDriver:
    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hurry_within_host(self._socket)
        self._offsets: dict[bytes, int] = {}
        self._end = 0
        self._views: list[memoryview] = []
        self._reply = memoryview(bytearray(1 << 20))

    def allocate(self, size_bytes: int) -> Bytes:
        buffer = touched(size_bytes)
        self._views.append(buffer.data)
        return buffer

    def make_key(self, digest: bytes) -> bytes:
        return digest

    def put(self, key: bytes, offset: int, size_bytes: int) -> bool:
        return self.batch_put([key], [offset], size_bytes)

    def get(self, key: bytes, offset: int, size_bytes: int) -> bool:
        return self.batch_get([key], [offset], size_bytes)

    def batch_put(self, keys: Sequence[bytes], offsets: Sequence[int], size_bytes: int) -> bool:
        total_bytes = len(keys) * size_bytes
        at = self._end
        self._end += total_bytes
        for index, key in enumerate(keys):
            self._offsets[key] = at + index * size_bytes
        views = [self._views[0][offset : offset + size_bytes] for offset in offsets]
        send_all(self._socket, [memoryview(_REQUEST.pack(_PUT, at, total_bytes, 0)), *views])
        receive_all(self._socket, self._reply[:1])
        return True

    def batch_get(self, keys: Sequence[bytes], offsets: Sequence[int], size_bytes: int) -> bool:
        # Keys of a batch were put as one batch, so that they lie together.
        at = self._offsets[keys[0]]
        self._socket.sendall(_REQUEST.pack(_GET, at, len(keys) * size_bytes, 0))
        if offsets[-1] == offsets[0] + (len(keys) - 1) * size_bytes:
            receive_all(self._socket, self._views[1][offsets[0] : offsets[-1] + size_bytes])
        else:
            for offset in offsets:
                receive_all(self._socket, self._views[1][offset : offset + size_bytes])
        return True

    def exists(self, keys: Sequence[bytes]) -> bool:
        self._socket.sendall(_REQUEST.pack(_EXISTS, 0, len(keys), len(keys) * _KEY_BYTES) + b"".join(keys))
        receive_all(self._socket, self._reply[: len(keys)])
        return True

    def clear(self) -> None:
        self._offsets.clear()
        self._end = 0

    def close(self) -> None:
        self._socket.close()


def send_all(connection: socket.socket, views: list[memoryview]) -> None:
    index = 0
    while index < len(views):
        sent = connection.sendmsg(views[index : index + 512])
        while index < len(views) and sent >= len(views[index]):
            sent -= len(views[index])
            index += 1
        if sent:
            views[index] = views[index][sent:]


def receive_all(connection: socket.socket, view: memoryview) -> None:
    while view:
        received = connection.recv_into(view)
        if not received:
            raise ConnectionError("the other side closed the connection")
        view = view[received:]


def _serve_connection(connection: socket.socket) -> None:
    arena = _populated_arena()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    hurry_within_host(connection)
    header = memoryview(bytearray(_REQUEST.size))
    keys = memoryview(bytearray(1 << 20))
    ones = memoryview(b"\1" * len(keys))
    with connection:
        while True:
            try:
                receive_all(connection, header)
            except ConnectionError:
                return
            operation, at, size_bytes, keys_bytes = _REQUEST.unpack(header)
            if operation == _PUT:
                receive_all(connection, arena[at : at + size_bytes])
                connection.sendall(ones[:1])
            elif operation == _GET:
                connection.sendall(arena[at : at + size_bytes])
            else:
                receive_all(connection, keys[:keys_bytes])
                connection.sendall(ones[:size_bytes])


def _populated_arena() -> memoryview:
    """The kind of memory a store that can also be mapped by its clients has: pages of a memfd."""
    file = os.memfd_create("raw-tcp-arena")
    os.posix_fallocate(file, 0, MAX_PHASE_BYTES)
    arena = mmap.mmap(file, MAX_PHASE_BYTES, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    os.close(file)
    return memoryview(arena)


def main() -> None:
    listener = socket.create_server(("127.0.0.1", int(sys.argv[1])), backlog=64)
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_serve_connection, args=(connection,), daemon=True).start()


if __name__ == "__main__":
    main()
