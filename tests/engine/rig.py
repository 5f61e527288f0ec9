"""Processes of the engine tests: vLLM engines (host.py) and a real mooncake-store, and what to ask them."""

import contextlib
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from suite_cache import suite_cache

ROOT = Path(__file__).resolve().parents[2]
ANSWER_TIMEOUT_SECONDS = 240.0
BLOCK_TOKENS = 32
MAX_TOKENS = 24

# One token a byte, so that prompts of an exact length are easy to write.
DOCUMENT = list(("The quick brown fox jumps over the lazy dog. " * 40).encode())

OFFLINE_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "PYTHONHASHSEED": "0",
    # vLLM compiles a few functions even with enforce_eager, which would need a C++ compiler.
    "TORCHDYNAMO_DISABLE": "1",
    "PYTHONWARNINGS": "ignore",
}


def make_tiny_model(*options: str, kind: str = "tiny") -> str:
    """A model folder in the cache; `kind` and `options` are those of scripts/make_model.py."""
    out = suite_cache() / "models" / "-".join([kind, *options]).replace("--", "")
    out.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(ROOT / "scripts" / "make_model.py"), kind, str(out), *options]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    return str(out)


def engine_settings(model: str) -> dict[str, Any]:
    """Of vllm.LLM."""
    return {
        "model": model,
        "enforce_eager": True,
        "max_model_len": 2048,
        "block_size": BLOCK_TOKENS,
        "dtype": "float32",
        "max_num_seqs": 8,
        "max_num_batched_tokens": 2048,
        "kv_cache_memory_bytes": 64 << 20,
        "prefix_caching_hash_algo": "sha256_cbor",
        "seed": 0,
    }


def free_port() -> int:
    """A free port that is not one of those which the kernel gives to connections (from 32768 on): an engine
    binds it only when it has loaded its model, and who was killed binds it again."""
    while True:
        port = random.randrange(15_000, 30_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def end_process(process: subprocess.Popen[Any]) -> None:
    """SIGTERM, then SIGKILL; returns when the process is gone."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()


class EngineHost:
    """One host.py. `send` and `receive` may be apart, so that two engines can run at the same time."""

    def __init__(
        self, log: Path, python_path: Sequence[Path] = (), environment: Mapping[str, str | None] | None = None
    ) -> None:
        """`environment`: changes; None takes a variable away."""
        self.log = log
        # VLLM_CPU_KVCACHE_SPACE would override kv_cache_memory_bytes.
        changes = {**OFFLINE_ENVIRONMENT, "VLLM_CPU_KVCACHE_SPACE": None, **(environment or {})}
        changes["PYTHONPATH"] = os.pathsep.join(map(str, (*python_path, ROOT)))
        variables = {name: value for name, value in {**os.environ, **changes}.items() if value is not None}
        with log.open("ab") as log_file:
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("host.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_file,
                env=variables,
                text=True,
                bufsize=1,
            )

    def send(self, command: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
        self.process.stdin.flush()

    def receive(self, timeout_s: float = ANSWER_TIMEOUT_SECONDS) -> dict[str, Any]:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], timeout_s)
        line = self.process.stdout.readline() if ready else ""
        assert line, f"no answer from the engine; the end of its log:\n{self._log_tail()}"
        answer: dict[str, Any] = json.loads(line)
        assert "error" not in answer, f"{answer['error']}\n{self._log_tail()}"
        return answer

    def call(self, command: str, **arguments: Any) -> dict[str, Any]:
        self.send(command, **arguments)
        return self.receive()

    def wait_killed(self) -> None:
        assert self.process.wait(ANSWER_TIMEOUT_SECONDS) == -signal.SIGKILL

    def close(self) -> None:
        """The end of its input lets the engine end its own workers first."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        end_process(self.process)
        self.process.stdout.close()

    def _log_tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(line[:300] for line in lines[-40:])


class StoreProcess:
    """A mooncake-store on a port of its own, which it keeps over kills and restarts."""

    def __init__(self, directory: Path, *flags: str, pool_size: str = "256mb") -> None:
        """`flags`: more of those of `mooncake-store serve`."""
        self.directory = directory
        self.port = free_port()
        self.admin_port = free_port()
        self.pool_size = pool_size
        self.flags = flags
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> None:
        ready_file = self.directory / "ready"
        ready_file.unlink(missing_ok=True)
        log_path = self.directory / "store.log"
        with log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "store_server.cli", "serve", "--host", "127.0.0.1"),
                    *("--port", str(self.port), "--admin-port", str(self.admin_port)),
                    *("--pool-size-bytes", self.pool_size, "--ready-file", str(ready_file)),
                    *self.flags,
                ],
                stdout=log,
                stderr=log,
                cwd=ROOT,
            )
        deadline = time.monotonic() + 60
        while not ready_file.exists():
            assert self.process.poll() is None, log_path.read_text()
            assert time.monotonic() < deadline, log_path.read_text()
            time.sleep(0.02)

    def stats(self) -> dict[str, Any]:
        """The store's own numbers (kvcore.metrics, without prefix), and more."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.admin_port}/stats", timeout=60) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def wait_killed(self) -> None:
        assert self.process is not None
        assert self.process.wait(60) == -signal.SIGKILL

    def close(self) -> None:
        if self.process is not None:
            end_process(self.process)


def transfer_config(store: StoreProcess, **extra: Any) -> dict[str, Any]:
    """--kv-transfer-config; deadlines are generous, because test machines are slow."""
    return {
        "kv_connector": "MooncakeSuiteConnector",
        "kv_connector_module_path": "mooncake_connector.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "store_address": store.address,
            "lookup_timeout_ms": "20s",
            "lookup_wait_ms": "20s",
            "load_timeout_ms": "60s",
            "pd_wait_ms": "60s",
            **extra,
        },
    }


def request(
    tokens: Sequence[int], max_tokens: int = MAX_TOKENS, params: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {"tokens": list(tokens), "max_tokens": max_tokens, "params": params}


def pd_params(role: str, transfer_id: str, wait_ms: int = 60_000) -> dict[str, Any]:
    return {"mooncake_pd": {"role": role, "transfer_id": transfer_id, "wait_ms": wait_ms}}


def tokens_of(answer: dict[str, Any]) -> list[list[int]]:
    return [output["tokens"] for output in answer["outputs"]]


def cached_of(answer: dict[str, Any]) -> list[int]:
    return [output["cached"] for output in answer["outputs"]]
