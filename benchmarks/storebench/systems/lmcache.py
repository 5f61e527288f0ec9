"""LMCache's own network server (lm://) with a client built on its wire classes.

Its connector inside an engine sends and receives exactly these messages; the bytes of a value follow the
header in a second send, without TCP_NODELAY, which is what its 4 KiB latency shows. It has no batches, no
deletion and no acknowledgement of a put: an existence question behind the puts makes them as final as
everybody else's, and keys are used again and again because nothing is ever freed.
"""

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from storebench.clients import ClientSpec
from storebench.driver import Bytes, touched
from storebench.peers import venv_python
from storebench.plan import Cell
from storebench.processes import Process, accepts, free_port

# Its full closure wants CUDA packages; this is what the server and the wire classes import on a CPU.
_INSTALL = (
    (
        "torch==2.13.0",
        "numpy==2.2.6",
        "numba",
        "cachetools",
        "msgspec",
        "psutil",
        "pyyaml",
        "pyzmq",
        "requests",
    ),
    ("prometheus_client", "sortedcontainers", "aiohttp", "aiofiles", "httpx", "nvtx", "opentelemetry-api"),
    ("py-cpuinfo", "safetensors"),
    ("--no-deps", "lmcache==0.5.6"),
)
_QUIET = {"LMCACHE_LOG_LEVEL": "ERROR", "LMCACHE_TRACK_USAGE": "false"}


class LMCache:
    name = "lmcache-tcp"
    about = "LMCache 0.5.6, its lm:// server and wire classes"

    def __init__(self) -> None:
        self._port = free_port()
        self._server: Process | None = None
        self._python = Path()

    def start(self, work_dir: Path) -> None:
        self._python = venv_python("lmcache-0.5.6", _INSTALL)
        self._server = Process(
            [self._python, "-m", "lmcache.v1.server", "127.0.0.1", str(self._port)],
            work_dir / "lmcache-server.log",
            environment=_QUIET,
        )
        self._server.wait_until(lambda: accepts(self._port), 120, "LMCache server")

    def stop(self) -> None:
        if self._server:
            self._server.stop()

    @property
    def server_pids(self) -> list[int]:
        return [self._server.pid] if self._server else []

    def client(self) -> ClientSpec:
        return ClientSpec(
            "storebench.systems.lmcache:LMCacheDriver",
            {"port": self._port},
            python=str(self._python),
            environment=_QUIET,
        )

    def measures(self, cell: Cell) -> bool:
        return cell.num_keys == 1 or cell.op == "exists"


class LMCacheDriver:
    def __init__(self, port: int) -> None:
        import torch
        from lmcache.utils import CacheEngineKey
        from lmcache.v1 import protocol
        from lmcache.v1.memory_management import MemoryFormat

        self._torch: Any = torch
        self._protocol: Any = protocol
        self._key_class: Any = CacheEngineKey
        self._format: Any = MemoryFormat(1)
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._views: list[memoryview] = []
        self._next_hash = 0

    def allocate(self, size_bytes: int) -> Bytes:
        buffer = touched(size_bytes)
        self._views.append(buffer.data)
        return buffer

    def make_key(self, digest: bytes) -> Any:
        self._next_hash += 1
        return self._key_class("bench", 1, self._socket.getsockname()[1], self._next_hash, self._torch.uint8)

    def put(self, key: Any, offset: int, size_bytes: int) -> bool:
        return self.batch_put([key], [offset], size_bytes)

    def get(self, key: Any, offset: int, size_bytes: int) -> bool:
        self._send("GET", key, 0)
        reply = self._reply()
        if reply.code != self._protocol.ServerReturnCode.SUCCESS or reply.length != size_bytes:
            return False
        self._receive(self._views[1][offset : offset + size_bytes])
        return True

    def batch_put(self, keys: Sequence[Any], offsets: Sequence[int], size_bytes: int) -> bool:
        for key, offset in zip(keys, offsets, strict=True):
            self._send("PUT", key, size_bytes)
            self._socket.sendall(self._views[0][offset : offset + size_bytes])
        return self.exists(keys[-1:])

    def batch_get(self, keys: Sequence[Any], offsets: Sequence[int], size_bytes: int) -> bool:
        return all(self.get(key, offset, size_bytes) for key, offset in zip(keys, offsets, strict=True))

    def exists(self, keys: Sequence[Any]) -> bool:
        found = True
        for key in keys:
            self._send("EXIST", key, 0)
            found &= self._reply().code == self._protocol.ServerReturnCode.SUCCESS
        return found

    def clear(self) -> None:
        self._next_hash = 0

    def close(self) -> None:
        self._socket.close()

    def _send(self, command: str, key: Any, size_bytes: int) -> None:
        shape = self._torch.Size([size_bytes, 0, 0, 0])
        message = self._protocol.ClientMetaMessage(
            self._protocol.ClientCommand[command], key, size_bytes, self._format, self._torch.uint8, shape
        )
        self._socket.sendall(message.serialize())

    def _reply(self) -> Any:
        header = bytearray(self._protocol.ServerMetaMessage.packlength())
        self._receive(memoryview(header))
        return self._protocol.ServerMetaMessage.deserialize(bytes(header))

    def _receive(self, view: memoryview) -> None:
        while view:
            received = self._socket.recv_into(view)
            if not received:
                raise ConnectionError("the LMCache server closed the connection")
            view = view[received:]
