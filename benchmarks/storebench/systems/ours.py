"""What our systems share: a `mooncake-store` of their own and the driver of StoreClient."""

import json
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from storebench.clients import ClientSpec
from storebench.driver import Bytes, touched
from storebench.plan import POOL_BYTES, Cell
from storebench.processes import Process, SystemFailed


class Ours:
    """One store and how its clients talk to it."""

    def __init__(self, name: str, plane: str, checksums: bool = True) -> None:
        self.name = name
        suite = f"mooncake-kv-suite {version('mooncake-kv-suite')}"
        self.about = f"{suite}, plane {plane}{'' if checksums else ', without checksums'}"
        self._client = {"plane": plane, "checksums": checksums}
        self._server: Process | None = None
        self._address = ""

    def start(self, work_dir: Path) -> None:
        ready_file = work_dir / f"{self.name}.ready"
        self._server = Process(
            [
                sys.executable,
                *("-m", "store_server.cli", "serve"),
                *("--host", "127.0.0.1"),
                *("--port", "0"),
                *("--admin-port", "0"),
                *("--pool-size", str(POOL_BYTES)),
                *("--ready-file", str(ready_file)),
            ],
            work_dir / f"{self.name}-server.log",
        )
        self._server.wait_until(ready_file.exists, 60, "mooncake-store")
        self._address = json.loads(ready_file.read_text())["address"]

    def stop(self) -> None:
        if self._server:
            self._server.stop()

    @property
    def server_pids(self) -> list[int]:
        return [self._server.pid] if self._server else []

    def client(self) -> ClientSpec:
        return ClientSpec("storebench.systems.ours:OursDriver", {"address": self._address, **self._client})

    def measures(self, cell: Cell) -> bool:
        return True


class OursDriver:
    def __init__(self, address: str, plane: str, checksums: bool) -> None:
        from kvcore.client.sync_client import StoreClient
        from kvcore.wire.messages import Status

        self._ok = Status.OK
        self._store = StoreClient.connect(address, planes=(plane,), checksums=checksums)
        state = self._store.counters()
        if state["plane"] != plane:
            reason = state["plane_reason"] or state["last_error"]
            raise SystemFailed(f"wanted the {plane} plane, got {state['plane'] or 'none'}: {reason}")
        self._views: list[memoryview] = []

    def allocate(self, size_bytes: int) -> Bytes:
        buffer = touched(size_bytes)
        self._views.append(buffer.data)
        return buffer

    def make_key(self, digest: bytes) -> bytes:
        return digest

    def put(self, key: bytes, offset: int, size_bytes: int) -> bool:
        return self._store.put_from(key, self._views[0][offset : offset + size_bytes]) is self._ok

    def get(self, key: bytes, offset: int, size_bytes: int) -> bool:
        return self._store.get_into(key, self._views[1][offset : offset + size_bytes]) == size_bytes

    def batch_put(self, keys: Sequence[bytes], offsets: Sequence[int], size_bytes: int) -> bool:
        source = self._views[0]
        buffers = [source[offset : offset + size_bytes] for offset in offsets]
        return all(status is self._ok for status in self._store.batch_put_from(keys, buffers))

    def batch_get(self, keys: Sequence[bytes], offsets: Sequence[int], size_bytes: int) -> bool:
        sink = self._views[1]
        buffers = [sink[offset : offset + size_bytes] for offset in offsets]
        return all(got == size_bytes for got in self._store.batch_get_into(keys, buffers))

    def exists(self, keys: Sequence[bytes]) -> bool:
        return all(self._store.batch_exists(keys))

    def clear(self) -> None:
        self._store.evict()

    def close(self) -> None:
        self._store.close()
