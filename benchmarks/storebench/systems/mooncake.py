"""What both Mooncake systems share: the package, the master, and the driver of its Python client.

Version and flags are those its own documentation gives for a TCP deployment without a metadata server
(P2PHANDSHAKE). Values are immutable there too, so every put uses a fresh key.
"""

import ctypes
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from storebench.driver import Bytes, touched
from storebench.peers import package_dir
from storebench.plan import MIB
from storebench.processes import Process, SystemFailed, accepts, free_port

REQUIREMENT = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
LOCAL_BUFFER_BYTES = 128 * MIB
_MISSING_LIBRARY = "; it needs: apt-get install libibverbs1 librdmacm1 libnuma1"
QUIET = {"MC_LOG_LEVEL": "ERROR", "GLOG_minloglevel": "2"}


def installed_package() -> Path:
    return package_dir("mooncake-0.3.13.post1", REQUIREMENT)


class Master:
    def __init__(self, name: str) -> None:
        self._name = name
        self.port = free_port()
        self._process: Process | None = None

    def start(self, package: Path, work_dir: Path) -> None:
        self._process = Process(
            [
                package / "mooncake" / "mooncake_master",
                "--rpc_address=127.0.0.1",
                f"--rpc_port={self.port}",
                "--metrics_host=127.0.0.1",
                f"--metrics_port={free_port()}",
            ],
            work_dir / f"{self._name}-master.log",
        )
        try:
            self._process.wait_until(lambda: accepts(self.port), 30, "mooncake_master")
        except SystemFailed as error:
            raise SystemFailed(f"{error}{_MISSING_LIBRARY}") from error

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def pids(self) -> list[int]:
        return [self._process.pid] if self._process else []

    def stop(self) -> None:
        if self._process:
            self._process.stop(signal.SIGINT)


def connect(master: str, segment_bytes: int) -> Any:
    """A client over TCP; with a segment it is a store node."""
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        raise SystemFailed(f"cannot import mooncake: {error}{_MISSING_LIBRARY}") from error
    store = MooncakeDistributedStore()
    here = f"127.0.0.1:{free_port()}"
    status = store.setup(here, "P2PHANDSHAKE", segment_bytes, LOCAL_BUFFER_BYTES, "tcp", "", master)
    if status:
        raise SystemFailed(f"mooncake's setup() gave {status}")
    return store


def touch_segment(store: Any, address: int, value_bytes: int, segment_bytes: int) -> None:
    """Fill most of a fresh segment once and forget it: first touch costs more than all that is measured."""
    for index in range(int(segment_bytes * 0.85) // value_bytes):
        if store.put_from(f"touch-{index}", address, value_bytes):
            break
    store.remove_all(True)


class MooncakeDriver:
    def __init__(self, store: Any) -> None:
        self._store = store
        self._addresses: list[int] = []

    def allocate(self, size_bytes: int) -> Bytes:
        buffer = touched(size_bytes)
        self._register(buffer.ctypes.data, size_bytes)
        return buffer

    def _register(self, address: int, size_bytes: int) -> None:
        if status := self._store.register_buffer(address, size_bytes):
            raise SystemFailed(f"mooncake's register_buffer() gave {status}")
        self._addresses.append(address)

    def make_key(self, digest: bytes) -> str:
        return digest.hex()

    def put(self, key: str, offset: int, size_bytes: int) -> bool:
        return bool(self._store.put_from(key, self._addresses[0] + offset, size_bytes) == 0)

    def get(self, key: str, offset: int, size_bytes: int) -> bool:
        return bool(self._store.get_into(key, self._addresses[1] + offset, size_bytes) == size_bytes)

    def batch_put(self, keys: Sequence[str], offsets: Sequence[int], size_bytes: int) -> bool:
        addresses = [self._addresses[0] + offset for offset in offsets]
        return not any(self._store.batch_put_from(keys, addresses, [size_bytes] * len(keys)))

    def batch_get(self, keys: Sequence[str], offsets: Sequence[int], size_bytes: int) -> bool:
        addresses = [self._addresses[1] + offset for offset in offsets]
        sizes = [size_bytes] * len(keys)
        return bool(self._store.batch_get_into(keys, addresses, sizes) == sizes)

    def exists(self, keys: Sequence[str]) -> bool:
        return all(found == 1 for found in self._store.batch_is_exist(keys))

    def clear(self) -> None:
        self._store.remove_all(True)

    def close(self) -> None:
        self._store.close()


class PooledMooncakeDriver(MooncakeDriver):
    """Buffers come from the memory shared with the daemon: only those make its shared-memory path work."""

    def allocate(self, size_bytes: int) -> Bytes:
        address = self._store.alloc_from_mem_pool(size_bytes)
        if not address:
            raise SystemFailed(f"mooncake's alloc_from_mem_pool() had no {size_bytes} bytes")
        self._register(address, size_bytes)
        buffer = np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(address))
        buffer[:] = 1
        return buffer
