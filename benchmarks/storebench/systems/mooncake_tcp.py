"""Mooncake over TCP: a store node in its own process, one master, clients without a segment."""

import signal
import sys
import threading
from pathlib import Path

from storebench.clients import BENCHMARKS_DIR, ClientSpec
from storebench.driver import touched
from storebench.plan import MIB, POOL_BYTES, Cell
from storebench.processes import Process
from storebench.systems import mooncake


class MooncakeTcp:
    name = "mooncake-tcp"
    about = f"{mooncake.REQUIREMENT} over TCP (P2PHANDSHAKE), the segment in a process of its own"

    def __init__(self) -> None:
        self._master = mooncake.Master(self.name)
        self._node: Process | None = None
        self._package = Path()

    def start(self, work_dir: Path) -> None:
        self._package = mooncake.installed_package()
        self._master.start(self._package, work_dir)
        ready_file = work_dir / "mooncake-node.ready"
        self._node = Process(
            [sys.executable, "-m", "storebench.systems.mooncake_tcp", self._master.address, ready_file],
            work_dir / "mooncake-node.log",
            environment={**mooncake.QUIET, "PYTHONPATH": f"{BENCHMARKS_DIR}:{self._package}"},
        )
        self._node.wait_until(ready_file.exists, 60, "mooncake store node")

    def stop(self) -> None:
        if self._node:
            self._node.stop()
        self._master.stop()

    @property
    def server_pids(self) -> list[int]:
        return self._master.pids + ([self._node.pid] if self._node else [])

    def client(self) -> ClientSpec:
        return ClientSpec(
            "storebench.systems.mooncake_tcp:driver",
            {"master": self._master.address},
            python_path=(self._package,),
            environment=mooncake.QUIET,
        )

    def measures(self, cell: Cell) -> bool:
        return True


def driver(master: str) -> mooncake.MooncakeDriver:
    return mooncake.MooncakeDriver(mooncake.connect(master, 0))


def main() -> None:
    """The store node: owns the segment, touches it, then waits for SIGTERM."""
    master, ready_file = sys.argv[1:]
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    store = mooncake.connect(master, POOL_BYTES)
    toucher = mooncake.connect(master, 0)
    source = touched(16 * MIB)
    toucher.register_buffer(source.ctypes.data, source.nbytes)
    mooncake.touch_segment(toucher, source.ctypes.data, source.nbytes, POOL_BYTES)
    toucher.close()
    Path(ready_file).touch()
    ended.wait()
    store.close()


if __name__ == "__main__":
    main()
