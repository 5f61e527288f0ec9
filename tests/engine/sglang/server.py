"""One real SGLang HTTP server on CPU, and what tests ask of it."""

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.engine.rig import ROOT, StoreProcess, free_port

PAGE_TOKENS = 16
ADMIN_KEY = "admin-key"
START_TIMEOUT_SECONDS = 400.0
ANSWER_TIMEOUT_SECONDS = 240.0

ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
    "TORCHDYNAMO_DISABLE": "1",
}
SHARED_MEMORY = "/dev/shm/"

# 600 tokens of the tiny model: pages are full up to 592.
PROMPT = [4 + i * 37 % 250 for i in range(600)]
FULL_PAGES = len(PROMPT) // PAGE_TOKENS * PAGE_TOKENS


def suite_config(store: StoreProcess, interface_v1: bool = True, **extra: Any) -> dict[str, Any]:
    """The extra config of the backend; deadlines are generous, because test machines are slow."""
    return {
        "backend_name": "mooncake_suite",
        "module_path": "sglang_hicache_backend.backend",
        "class_name": "MooncakeSuiteHiCache",
        "interface_v1": int(interface_v1),
        "prefetch_threshold": PAGE_TOKENS,
        "store_address": store.address,
        "lookup_timeout_ms": "20s",
        "load_timeout_ms": "60s",
        "save_timeout_ms": "60s",
        **extra,
    }


def hicache_flags(layout: str, io_backend: str, extra_config: dict[str, Any] | None = None) -> list[str]:
    """Without `extra_config` no storage, until one is attached."""
    flags = [
        "--enable-hierarchical-cache",
        "--hicache-ratio",
        "2.0",
        "--hicache-write-policy",
        "write_through",
    ]
    flags += ["--hicache-mem-layout", layout, "--hicache-io-backend", io_backend]
    if extra_config is not None:
        flags += [
            "--hicache-storage-backend",
            "dynamic",
            "--hicache-storage-prefetch-policy",
            "wait_complete",
        ]
        flags += ["--hicache-storage-backend-extra-config", json.dumps(extra_config)]
    return flags


def wait_until(is_true: Callable[[], bool], explain: Callable[[], str], timeout_s: float = 180.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline, explain()
        time.sleep(0.2)


def kill_group(process: subprocess.Popen[Any]) -> None:
    """Ends a process that leads a group, and the group. SGLang takes seconds to end by itself, and leaves its
    shared memory behind either way."""
    inodes: set[int] = set()
    with contextlib.suppress(psutil.NoSuchProcess):
        leader = psutil.Process(process.pid)
        for member in (leader, *leader.children(recursive=True)):
            with contextlib.suppress(OSError):
                maps = Path(f"/proc/{member.pid}/maps").read_text().splitlines()
                inodes.update(int(line.split()[4]) for line in maps if SHARED_MEMORY in line)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    # By inode: a semaphore is mapped under a temporary name.
    for path in Path(SHARED_MEMORY).iterdir():
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_ino in inodes:
                path.unlink()


class SglangServer:
    """`python -m sglang.launch_server`, started at once; `wait_ready` may come later, so that several start
    at the same time."""

    def __init__(
        self,
        directory: Path,
        model: str,
        *flags: str,
        environment: Mapping[str, str] | None = None,
        port: int | None = None,
    ) -> None:
        self.port = port or free_port()
        self.log = directory / f"sglang-{self.port}.log"
        command = [
            *(sys.executable, "-m", "sglang.launch_server", "--model-path", model, "--device", "cpu"),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--dist-init-addr", f"127.0.0.1:{free_port()}"),
            *("--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
            *("--max-total-tokens", "4096", "--mem-fraction-static", "0.3", "--page-size", str(PAGE_TOKENS)),
            *("--dtype", "bfloat16", "--disable-cuda-graph", "--skip-server-warmup", "--random-seed", "0"),
            *("--enable-metrics", "--enable-cache-report", "--admin-api-key", ADMIN_KEY),
            *flags,
        ]
        variables = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT), "TMPDIR": str(directory)}
        variables.update(environment or {})
        with self.log.open("ab") as log:
            # A group of its own: the scheduler and the detokenizer are ended with the server.
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=directory, env=variables, start_new_session=True
            )
        self._ready = False

    def wait_ready(self) -> "SglangServer":
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while not self._ready:
            assert self.process.poll() is None, f"SGLang ended:\n{self.log_tail()}"
            assert time.monotonic() < deadline, f"SGLang does not start:\n{self.log_tail()}"
            try:
                self._ready = self.ask("GET", "/health", timeout=10)[0] == 200
            except OSError:
                time.sleep(0.3)
        return self

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        timeout: float = ANSWER_TIMEOUT_SECONDS,
        admin: bool = True,
    ) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {ADMIN_KEY}"} if admin else {}
        )
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def generate(self, tokens: Sequence[int], max_tokens: int = 24) -> dict[str, Any]:
        """SGLang's answer, with `tokens` (ids), `logprobs` (of each token) and `cached` (where the prompt's
        prefix came from: device, host, storage) beside it."""
        self.wait_ready()
        body = {
            "input_ids": list(tokens),
            "sampling_params": {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True},
            "return_logprob": True,
        }
        status, text = self.ask("POST", "/generate", body)
        assert status == 200, f"{text}\n{self.log_tail()}"
        answer: dict[str, Any] = json.loads(text)
        meta = answer["meta_info"]
        return {
            "tokens": answer["output_ids"],
            "logprobs": [entry[0] for entry in meta["output_token_logprobs"]],
            "cached": {"device": 0, "host": 0, "storage": 0, **(meta.get("cached_tokens_details") or {})},
        }

    def flush(self) -> None:
        """Empties the device's and the host's cache, not the storage."""
        self.ask_when_idle("POST", "/flush_cache")

    def ask_when_idle(self, method: str, path: str, body: Any = None) -> None:
        """SGLang refuses what changes its caches while it has requests, or pages on their way."""
        wait_until(lambda: self.ask(method, path, body)[0] == 200, lambda: f"{path}:\n{self.log_tail()}")

    def wait_saved(self, num_tokens: int = FULL_PAGES) -> None:
        """Until so many tokens have gone to the storage, since the server started."""
        self.wait_metrics(lambda found: found.get("sglang:backuped_tokens_total", 0.0) >= num_tokens)

    def wait_metrics(self, is_right: Callable[[dict[str, float]], bool]) -> None:
        """SGLang counts some things only after its answer has gone out."""
        found: dict[str, float] = {}

        def is_there() -> bool:
            found.update(self.metrics())
            return is_right(found)

        wait_until(is_there, lambda: f"{found}\n{self.log_tail()}")

    def metrics(self) -> dict[str, float]:
        """Prometheus' samples by name, labels dropped and their values added up."""
        status, text = self.ask("GET", "/metrics/")
        assert status == 200, text
        samples: dict[str, float] = {}
        for line in text.splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0]
                samples[name] = samples.get(name, 0.0) + float(value)
        return samples

    def log_tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(line[:300] for line in lines[-40:])

    def close(self) -> None:
        kill_group(self.process)
