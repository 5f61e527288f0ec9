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
from storebench.processes import SystemFailed

from sglangbench.plan import EngineSpec, Prefetched, Shape
from sglangbench.storages import ROOT, Storage

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
        room_bytes = (shape.prompts + 1) * shape.prompt_bytes + (256 << 20)
        self._storage = Storage(name, room_bytes, directory)
        self._workers: list[Worker] = []

    def start(self) -> None:
        storage = self._storage
        storage.start()
        for role, config in zip(("first", "second"), storage.configs, strict=True):
            spec = EngineSpec(shape=self._shape, backend=storage.backend, extra_config=config)
            log = self._directory / f"{self.name}-{role}.log"
            self._workers.append(Worker(spec, storage.environment, log))
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
        self._storage.stop()
