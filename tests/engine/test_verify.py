"""verify-vllm against vLLM's own HTTP server, with a store and after the store's death."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from demo_lib.processes import Processes

from tests.engine.rig import OFFLINE_ENVIRONMENT, ROOT, StoreProcess, free_port, transfer_config

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


def verify(url: str, *options: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "mooncake_connector.verify", url, "--json", "--settle-s", "1", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.stdout, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, report


def test_a_server_passes_with_its_store_and_fails_without(
    tmp_path: Path, store: StoreProcess, engine_kwargs: dict[str, Any]
) -> None:
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", engine_kwargs["model"]),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", engine_kwargs["dtype"], "--enforce-eager"),
        *("--max-model-len", "2048", "--block-size", str(engine_kwargs["block_size"])),
        *("--kv-cache-memory-bytes", str(engine_kwargs["kv_cache_memory_bytes"]), "--seed", "0"),
        *("--prefix-caching-hash-algo", engine_kwargs["prefix_caching_hash_algo"]),
        *("--kv-transfer-config", json.dumps(transfer_config(store))),
    ]
    with Processes(tmp_path) as processes:
        processes.start("vllm", command, {**OFFLINE_ENVIRONMENT, "VLLM_SERVER_DEV_MODE": "1"})
        processes.wait_until_ready({"vllm": f"{url}/health"}, 400, lambda name: None)

        status, report = verify(url, "--tries", "6")
        verdict = report["verdict"]
        assert (status, verdict["code"]) == (0, "passed"), report
        assert verdict["hit_percent"] > 90
        # Nobody has told this server to count cached tokens in its answers: they were taken from its metrics.
        assert report["cold"]["cached_tokens"] == 0

        store.kill()
        status, report = verify(url, "--tries", "1")
        assert (status, report["verdict"]["code"]) == (1, "no_hit"), report
        assert report["cold"]["tokens"] == report["restored"]["tokens"]
