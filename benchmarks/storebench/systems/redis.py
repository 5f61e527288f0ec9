"""Redis over loopback TCP with redis-py and the hiredis parser.

redis-py returns values as new bytes objects; the copy into the caller's buffer is part of a get, as it is
for everybody else. Persistence is off.
"""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from storebench.clients import ClientSpec
from storebench.driver import Bytes, touched
from storebench.plan import Cell
from storebench.processes import Process, SystemFailed, accepts, free_port


class Redis:
    name = "redis-tcp"
    about = "Redis over TCP, redis-py with hiredis"

    def __init__(self) -> None:
        self._port = free_port()
        self._server: Process | None = None

    def start(self, work_dir: Path) -> None:
        program = shutil.which("redis-server")
        if program is None:
            raise SystemFailed("redis-server is not installed; install it with: apt-get install redis-server")
        self.about = f"{_version(program)} over TCP, redis-py with hiredis"
        self._server = Process(
            [
                program,
                *("--bind", "127.0.0.1"),
                *("--port", str(self._port)),
                *("--save", ""),
                *("--appendonly", "no"),
                *("--dir", str(work_dir)),
            ],
            work_dir / "redis-server.log",
        )
        self._server.wait_until(lambda: accepts(self._port), 20, "redis-server")

    def stop(self) -> None:
        if self._server:
            self._server.stop()

    @property
    def server_pids(self) -> list[int]:
        return [self._server.pid] if self._server else []

    def client(self) -> ClientSpec:
        return ClientSpec("storebench.systems.redis:RedisDriver", {"port": self._port})

    def measures(self, cell: Cell) -> bool:
        return True


def _version(program: str) -> str:
    """As in "Redis server v=7.0.15 sha=..."."""
    words = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=10).stdout.split()
    return next((f"Redis {word[2:]}" for word in words if word.startswith("v=")), "Redis")


class RedisDriver:
    def __init__(self, port: int) -> None:
        import redis

        self._redis: Any = redis.Redis(host="127.0.0.1", port=port)
        self._views: list[memoryview] = []

    def allocate(self, size_bytes: int) -> Bytes:
        buffer = touched(size_bytes)
        self._views.append(buffer.data)
        return buffer

    def make_key(self, digest: bytes) -> bytes:
        return digest

    def put(self, key: bytes, offset: int, size_bytes: int) -> bool:
        return bool(self._redis.set(key, self._views[0][offset : offset + size_bytes]))

    def get(self, key: bytes, offset: int, size_bytes: int) -> bool:
        return self._deliver(self._redis.get(key), offset, size_bytes)

    def batch_put(self, keys: Sequence[bytes], offsets: Sequence[int], size_bytes: int) -> bool:
        source = self._views[0]
        values = (source[offset : offset + size_bytes] for offset in offsets)
        return bool(self._redis.mset(dict(zip(keys, values, strict=True))))

    def batch_get(self, keys: Sequence[bytes], offsets: Sequence[int], size_bytes: int) -> bool:
        values = self._redis.mget(keys)
        return all(self._deliver(v, offset, size_bytes) for v, offset in zip(values, offsets, strict=True))

    def exists(self, keys: Sequence[bytes]) -> bool:
        # EXISTS with many keys only counts; a pipeline is what tells which ones are there.
        pipeline = self._redis.pipeline(transaction=False)
        for key in keys:
            pipeline.exists(key)
        return all(pipeline.execute())

    def clear(self) -> None:
        self._redis.flushall()

    def close(self) -> None:
        self._redis.close()

    def _deliver(self, value: bytes | None, offset: int, size_bytes: int) -> bool:
        if value is None or len(value) != size_bytes:
            return False
        self._views[1][offset : offset + size_bytes] = value
        return True
