"""vLLM's own HTTP server in front of the tiny model, and a router in front of two of them."""

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.engine.rig import BLOCK_TOKENS, OFFLINE_ENVIRONMENT, ROOT, end_process, free_port

START_SECONDS = 300.0
MODEL = "tiny"


class Server:
    """A process with an HTTP port; `post` and `get` raise for what is no 2xx."""

    def __init__(self, command: list[str], port: int, log: Path, environment: Mapping[str, str]) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        with log.open("ab") as log_file:
            self.process = subprocess.Popen(
                command, stdout=log_file, stderr=log_file, cwd=ROOT, env={**os.environ, **environment}
            )

    def wait(self, path: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(OSError):
                self.get(path)
                return
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])
            assert self.process.poll() is None and time.monotonic() < deadline, tail
            time.sleep(0.1)

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return str(answer.read().decode())

    def post(self, path: str, body: Any) -> tuple[dict[str, str], str]:
        """(headers in lower case, body)."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=240) as answer:
            headers = {name.lower(): value for name, value in answer.headers.items()}
            return headers, answer.read().decode()

    def metric(self, name: str) -> float:
        """The sum of its samples."""
        samples = [
            line.rpartition(" ")[2] for line in self.get("/metrics").splitlines() if line.startswith(name)
        ]
        return sum(map(float, samples))


def vllm_server(
    model: str,
    transfer: dict[str, Any] | None,
    log: Path,
    environment: Mapping[str, str] | None = None,
    port: int | None = None,
    flags: Sequence[str] = (),
    scripts: Path = Path(sys.executable).parent,
) -> Server:
    """`scripts`: where the command `vllm` lies."""
    port = port or free_port()
    command = [
        *(str(scripts / "vllm"), "serve", model, "--host", "127.0.0.1"),
        *("--port", str(port), "--served-model-name", MODEL, "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", "2048", "--max-num-seqs", "8", "--kv-cache-memory-bytes", str(64 << 20)),
        *("--block-size", str(BLOCK_TOKENS), "--enable-prompt-tokens-details"),
        *("--distributed-executor-backend", "uni", *flags),
    ]
    if transfer is not None:
        command += ["--kv-transfer-config", json.dumps(transfer)]
    return Server(command, port, log, {**OFFLINE_ENVIRONMENT, **(environment or {})})


def router_server(log: Path, *flags: str) -> Server:
    port = free_port()
    command = [sys.executable, "-m", "router.cli", "--port", str(port), *flags]
    return Server(command, port, log, {})


@contextlib.contextmanager
def ended(*servers: Server) -> Iterator[None]:
    try:
        yield
    finally:
        for server in servers:
            end_process(server.process)
