"""Real SGLang servers on CPU with one storage, and streams that are timed."""

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from storebench.processes import STOP_TIMEOUT_S, SystemFailed, free_port

from sglangbench.plan import Serving
from sglangbench.storages import ROOT, Storage

START_TIMEOUT_S = 400.0
ANSWER_TIMEOUT_S = 240.0
SAVE_TIMEOUT_S = 60.0
_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "PYTHONWARNINGS": "ignore",
    "MC_FORCE_TCP": "1",
}


class Streamed(msgspec.Struct, frozen=True, kw_only=True):
    """`tbt_s`: the mean time between tokens after the first. `stored`: tokens of the prompt that came from
    the storage."""

    ttft_s: float
    tbt_s: float
    tokens: list[int]
    stored: int


class Server:
    """`python -m sglang.launch_server`, started at once; SystemFailed for whatever it cannot do."""

    def __init__(
        self, name: str, model: Path, flags: Sequence[str], environment: Mapping[str, str], directory: Path
    ) -> None:
        self._port = free_port()
        self._log = directory / f"{name}.log"
        self._saved_tokens = 0.0
        command = [
            *(sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--device", "cpu"),
            *("--host", "127.0.0.1", "--port", str(self._port)),
            *("--dist-init-addr", f"127.0.0.1:{free_port()}", "--attention-backend", "torch_native"),
            *("--sampling-backend", "pytorch", "--mem-fraction-static", "0.3", "--dtype", "bfloat16"),
            *("--disable-cuda-graph", "--random-seed", "0", "--enable-metrics", "--enable-cache-report"),
            # Engines that wait for their turn must not take the others' time.
            *("--sleep-on-idle", *flags),
        ]
        paths = (environment.get("PYTHONPATH", ""), str(ROOT))
        variables = {**os.environ, **_ENVIRONMENT, **environment, "TMPDIR": str(directory)}
        variables["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        with self._log.open("wb") as log:
            # A group of its own: its scheduler and its detokenizer end with it.
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env=variables, cwd=directory, start_new_session=True
            )

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            with contextlib.suppress(OSError):
                if self._get("/health")[0] == 200:
                    return
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise self._failed("SGLang does not start")
            time.sleep(0.2)

    def stream(self, prompt: Sequence[int], max_tokens: int) -> Streamed:
        body = {
            "input_ids": list(prompt),
            "sampling_params": {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True},
            "stream": True,
        }
        times: list[float] = []
        answer: dict[str, Any] = {}
        started = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_TIMEOUT_S)
        with contextlib.closing(connection):
            try:
                connection.request(
                    "POST", "/generate", json.dumps(body), {"Content-Type": "application/json"}
                )
                response = connection.getresponse()
                for line in response:
                    if line.startswith(b"data: {"):
                        times.append(time.perf_counter())
                        answer = json.loads(line[6:])
            except OSError as error:
                raise self._failed(f"no answer: {error}") from error
        if response.status != 200 or len(times) < 2 or "error" in answer:
            raise self._failed(f"SGLang answered {response.status}: {str(answer)[:200]}")
        details = answer["meta_info"].get("cached_tokens_details") or {}
        return Streamed(
            ttft_s=times[0] - started,
            tbt_s=(times[-1] - times[0]) / (max_tokens - 1),
            tokens=answer["output_ids"],
            stored=int(details.get("storage", 0)),
        )

    def wait_saved(self, num_tokens: int) -> None:
        """Until so many tokens more have gone to the storage than at the last call."""
        self._saved_tokens += num_tokens
        deadline = time.monotonic() + SAVE_TIMEOUT_S
        while self._backed_up() < self._saved_tokens:
            if time.monotonic() > deadline:
                raise self._failed(f"{num_tokens} tokens are not in the storage after {SAVE_TIMEOUT_S:.0f} s")
            time.sleep(0.1)

    def _backed_up(self) -> float:
        lines = self._get("/metrics/")[1].splitlines()
        found = [line for line in lines if line.startswith("sglang:backuped_tokens_total")]
        return sum(float(line.rpartition(" ")[2]) for line in found)

    def _get(self, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=20)
        with contextlib.closing(connection):
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()

    def _failed(self, what: str) -> SystemFailed:
        tail = "\n".join(line[:200] for line in self._log.read_text(errors="replace").splitlines()[-10:])
        return SystemFailed(f"{what}:\n{tail}")

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class ServerPair:
    """Two servers on one storage; the second has seen no prompt. `plain`: one server without any."""

    def __init__(self, name: str, serving: Serving, model: Path, directory: Path) -> None:
        self.name, self._serving, self._model, self._directory = name, serving, model, directory
        self._storage = None if name == "plain" else Storage(name, serving.room_bytes, directory)
        self._servers: list[Server] = []

    def launch(self) -> None:
        storage = self._storage
        flags = ["--page-size", str(self._serving.page_tokens)]
        flags += ["--max-total-tokens", str(self._serving.device_tokens)]
        if storage is None:
            self._servers.append(Server(self.name, self._model, flags, {}, self._directory))
            return
        storage.start()
        flags += [
            "--enable-hierarchical-cache",
            "--hicache-ratio",
            "1.5",
            "--hicache-mem-layout",
            "page_first",
        ]
        flags += ["--hicache-io-backend", "kernel", "--hicache-write-policy", "write_through"]
        flags += ["--hicache-storage-prefetch-policy", "wait_complete"]
        flags += ["--hicache-storage-backend", storage.backend]
        for role, config in zip(("first", "second"), storage.configs, strict=True):
            extra = ["--hicache-storage-backend-extra-config", json.dumps(config)]
            self._servers.append(
                Server(
                    f"{self.name}-{role}",
                    self._model,
                    [*flags, *extra],
                    storage.environment,
                    self._directory,
                )
            )

    def wait_ready(self) -> None:
        for server in self._servers:
            server.wait_ready()

    @property
    def first(self) -> Server:
        return self._servers[0]

    @property
    def second(self) -> Server:
        return self._servers[-1]

    def close(self) -> None:
        for server in self._servers:
            server.close()
        if self._storage is not None:
            self._storage.stop()
