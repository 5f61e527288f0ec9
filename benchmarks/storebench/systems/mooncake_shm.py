"""Mooncake's shared-memory path: the `mooncake_client` daemon owns the segment, clients are its dummies."""

import signal
from pathlib import Path
from typing import Any

from storebench.clients import ClientSpec
from storebench.plan import BUFFER_BYTES, MIB, POOL_BYTES, Cell
from storebench.processes import Process, SystemFailed, accepts, free_port
from storebench.systems import mooncake

_MEMORY_POOL_BYTES = 4 * BUFFER_BYTES


class MooncakeShm:
    name = "mooncake-shm"
    about = f"{mooncake.REQUIREMENT}, a dummy client on the shared memory of mooncake_client"

    def __init__(self) -> None:
        self._master = mooncake.Master(self.name)
        self._port = free_port()
        self._daemon: Process | None = None
        self._package = Path()

    def start(self, work_dir: Path) -> None:
        self._package = mooncake.installed_package()
        self._master.start(self._package, work_dir)
        self._daemon = Process(
            [
                self._package / "mooncake" / "mooncake_client",
                "--host=127.0.0.1",
                f"--port={self._port}",
                f"--global_segment_size={POOL_BYTES // MIB}MB",
                f"--master_server_address={self._master.address}",
                "--metadata_server=P2PHANDSHAKE",
                "--protocol=tcp",
            ],
            work_dir / "mooncake-client.log",
            environment=mooncake.QUIET,
        )
        self._daemon.wait_until(lambda: accepts(self._port), 60, "mooncake_client")

    def stop(self) -> None:
        if self._daemon:
            self._daemon.stop(signal.SIGINT)
        self._master.stop()

    @property
    def server_pids(self) -> list[int]:
        return self._master.pids + ([self._daemon.pid] if self._daemon else [])

    def client(self) -> ClientSpec:
        return ClientSpec(
            "storebench.systems.mooncake_shm:driver",
            {"daemon": f"127.0.0.1:{self._port}"},
            python_path=(self._package,),
            environment=mooncake.QUIET,
        )

    def measures(self, cell: Cell) -> bool:
        return True


def driver(daemon: str) -> mooncake.PooledMooncakeDriver:
    from mooncake.store import MooncakeDistributedStore

    store: Any = MooncakeDistributedStore()
    if status := store.setup_dummy(_MEMORY_POOL_BYTES, mooncake.LOCAL_BUFFER_BYTES, daemon):
        raise SystemFailed(f"mooncake's setup_dummy() gave {status}")
    pooled = mooncake.PooledMooncakeDriver(store)
    touch = store.alloc_from_mem_pool(16 * MIB)
    store.register_buffer(touch, 16 * MIB)
    mooncake.touch_segment(store, touch, 16 * MIB, POOL_BYTES)
    return pooled
