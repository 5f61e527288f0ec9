"""What the engines of both benchmarks keep their pages in: ours and SGLang's own."""

import sys
from pathlib import Path
from typing import Any

from storebench.processes import Process, accepts, free_port
from storebench.systems import mooncake

ROOT = Path(__file__).resolve().parents[2]


class Storage:
    """One of plan.OURS and plan.PEERS. `start` may raise SystemFailed; `stop` is safe after that.

    After it `configs` has the extra config of two engines, and `environment` what both need.
    """

    def __init__(self, name: str, room_bytes: int, directory: Path) -> None:
        self.name, self._room_bytes, self._directory = name, room_bytes, directory
        self.backend = name if name in ("file", "mooncake") else "dynamic"
        self.configs: list[dict[str, Any]] = []
        self.environment: dict[str, str] = {}
        self._server: Process | mooncake.Master | None = None

    def start(self) -> None:
        start = {"file": self._start_file, "mooncake": self._start_mooncake}.get(self.name, self._start_ours)
        start()

    def stop(self) -> None:
        if self._server:
            self._server.stop()

    def _start_ours(self) -> None:
        port = free_port()
        command = [sys.executable, "-m", "store_server.cli", "serve", "--host", "127.0.0.1"]
        command += ["--port", str(port), "--admin-port", "-1", "--log-level", "warning"]
        command += ["--pool-size-bytes", str(self._room_bytes)]
        log = self._directory / f"{self.name}-store.log"
        server = Process(command, log, environment={"PYTHONPATH": str(ROOT)})
        self._server = server
        server.wait_until(lambda: accepts(port), 60, "mooncake-store")
        config = {
            "backend_name": "mooncake_suite",
            "module_path": "sglang_hicache_backend.backend",
            "class_name": "MooncakeSuiteHiCache",
            "interface_v1": 1,
            "store_address": f"127.0.0.1:{port}",
            "weights_id": "benchmark",
            "planes": ["tcp"] if self.name == "ours-tcp" else ["shm", "tcp"],
        }
        self.configs = [config, config]

    def _start_file(self) -> None:
        """What SGLang reads is in the page cache, since it was written just before."""
        self.configs = [{}, {}]
        self.environment = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(self._directory / "files")}

    def _start_mooncake(self) -> None:
        """As SGLang's guide has it: each engine contributes a segment, and the pages of the first lie in its
        own. The second contributes as little as Mooncake takes, so that none of them can lie there."""
        package = mooncake.installed_package()
        master = mooncake.Master(self.name)
        self._server = master
        master.start(package, self._directory)
        config = {
            "master_server_address": master.address,
            "metadata_server": "P2PHANDSHAKE",
            "protocol": "tcp",
            "device_name": "",
            "local_hostname": "127.0.0.1",
            "check_server": False,
        }
        sizes = (self._room_bytes >> 20 << 20, 16 << 20)
        self.configs = [{**config, "global_segment_size": size} for size in sizes]
        self.environment = {"PYTHONPATH": str(package), **mooncake.QUIET}
