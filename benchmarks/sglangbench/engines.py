"""Pairs of engines on one storage: the first saves, the second, which has seen nothing, prefetches."""

import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from storebench.processes import Process, SystemFailed, accepts, free_port
from storebench.systems.mooncake import Master, installed_package

from sglangbench.plan import EngineSpec, Prefetched, Shape

ROOT = Path(__file__).resolve().parents[2]
ANSWER_TIMEOUT_S = 300.0


class Worker:
    """worker.py with one spec; SystemFailed for whatever it cannot do."""

    def __init__(self, spec: EngineSpec, environment: Mapping[str, str], log: Path) -> None:
        self._log = log
        paths = (ROOT, ROOT / "benchmarks", environment.get("PYTHONPATH", ""))
        variables = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            **environment,
            "PYTHONPATH": os.pathsep.join(str(path) for path in paths if path),
        }
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "sglangbench.worker", msgspec.json.encode(spec).decode()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=variables,
                cwd=log.parent,
                text=True,
                bufsize=1,
            )

    def wait_ready(self) -> None:
        self._answer()

    def save(self, prompt: int) -> int:
        return int(self._ask("save", prompt))

    def prefetch(self, prompt: int) -> Prefetched:
        return msgspec.convert(self._ask("prefetch", prompt), Prefetched)

    def _ask(self, what: str, prompt: int) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": what, "prompt": prompt}) + "\n")
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], ANSWER_TIMEOUT_S)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
            raise SystemFailed(f"the engine has ended or does not answer:\n{tail}")
        answer = json.loads(line)
        if isinstance(answer, dict) and "error" in answer:
            raise SystemFailed(answer["error"])
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


class EnginePair:
    """A storage with two engines on it. `start` may raise SystemFailed; `close` is safe after that."""

    def __init__(self, name: str, shape: Shape, directory: Path) -> None:
        self.name, self._shape, self._directory = name, shape, directory
        self._store: Process | Master | None = None
        self._workers: list[Worker] = []

    def start(self) -> None:
        room_bytes = (self._shape.prompts + 1) * self._shape.prompt_bytes + (256 << 20)
        start = {"file": self._start_file, "mooncake": self._start_mooncake}.get(self.name, self._start_ours)
        configs, environment = start(room_bytes)
        backend = {"file": "file", "mooncake": "mooncake"}.get(self.name, "dynamic")
        for role, config in zip(("first", "second"), configs, strict=True):
            spec = EngineSpec(shape=self._shape, backend=backend, extra_config=config)
            self._workers.append(Worker(spec, environment, self._directory / f"{self.name}-{role}.log"))
        for worker in self._workers:
            worker.wait_ready()

    @property
    def first(self) -> Worker:
        return self._workers[0]

    @property
    def second(self) -> Worker:
        return self._workers[1]

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        if self._store:
            self._store.stop()

    def _start_ours(self, room_bytes: int) -> tuple[list[dict[str, Any]], dict[str, str]]:
        port = free_port()
        command = [
            sys.executable,
            "-m",
            "store_server.cli",
            "serve",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
        ]
        command += ["--admin-port", "-1", "--pool-size-bytes", str(room_bytes), "--log-level", "warning"]
        log = self._directory / f"{self.name}-store.log"
        self._store = Process(command, log, environment={"PYTHONPATH": str(ROOT)})
        self._store.wait_until(lambda: accepts(port), 60, "mooncake-store")
        config = {
            "backend_name": "mooncake_suite",
            "module_path": "sglang_hicache_backend.backend",
            "class_name": "MooncakeSuiteHiCache",
            "interface_v1": 1,
            "store_address": f"127.0.0.1:{port}",
            "weights_id": "benchmark",
            "planes": ["tcp"] if self.name == "ours-tcp" else ["shm", "tcp"],
        }
        return [config, config], {}

    def _start_file(self, room_bytes: int) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """SGLang's own; what it reads is in the page cache, since it was written just before."""
        return [{}, {}], {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(self._directory / "files")}

    def _start_mooncake(self, room_bytes: int) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """As SGLang's guide has it: each engine contributes a segment, and the pages of the first lie in its
        own. The second contributes as little as Mooncake takes, so that none of them can lie there."""
        package = installed_package()
        master = Master(self.name)
        self._store = master
        master.start(package, self._directory)
        config = {
            "master_server_address": master.address,
            "metadata_server": "P2PHANDSHAKE",
            "protocol": "tcp",
            "device_name": "",
            "local_hostname": "127.0.0.1",
            "check_server": False,
        }
        sizes = (room_bytes >> 20 << 20, 16 << 20)
        configs = [{**config, "global_segment_size": size} for size in sizes]
        return configs, {"PYTHONPATH": str(package), "MC_LOG_LEVEL": "ERROR", "GLOG_minloglevel": "2"}
