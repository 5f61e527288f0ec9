"""The commands of the demo's processes: what a user would type, with ports and paths filled in."""

import json
import sys
from pathlib import Path
from typing import NamedTuple

from demo_lib.processes import free_ports

MODEL_NAME = "demo"
BLOCK_SIZE_TOKENS = 32  # vLLM's CPU attention takes multiples of 32
MAX_MODEL_LEN_TOKENS = 4096
KV_CACHE_BYTES = 512 << 20
POOL_SIZE = "2gb"

# Everything here is what keeps vLLM small, quiet and off the network on a CPU-only machine.
ENGINE_ENV = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "TOKENIZERS_PARALLELISM": "false",
    # "auto" would bind both engines to the same core.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    # Together with --distributed-executor-backend uni this runs the worker inside the engine's process: one
    # process less, and none of their spinning for each other (for a second after each step), which on two
    # cores takes its time from the other engines.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Block hashes must be equal in every engine; up to vLLM 0.28 they are seeded per process otherwise.
    "PYTHONHASHSEED": "0",
}


class Ports(NamedTuple):
    store: int
    store_admin: int
    prefill: int
    decode: int
    router: int
    plain: int

    @classmethod
    def free(cls) -> "Ports":
        return cls(*free_ports(len(cls._fields)))

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{getattr(self, name)}"


class Cluster(NamedTuple):
    ports: Ports
    model_dir: Path
    dtype: str
    trace_dir: Path

    def trace_path(self, role: str) -> Path:
        return self.trace_dir / f"trace-{role}.jsonl"

    def store(self) -> list[str]:
        return [
            _script("mooncake-store"), "serve",
            "--host", "127.0.0.1",
            "--port", str(self.ports.store),
            "--admin-port", str(self.ports.store_admin),
            "--pool-size-bytes", POOL_SIZE,
        ]  # fmt: skip

    def engine(self, role: str) -> list[str]:
        """`role` is prefill or decode; both may save and load, the router decides who does what."""
        connector = {
            "kv_connector": "MooncakeSuiteConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "store_address": f"127.0.0.1:{self.ports.store}",
                "trace_path": str(self.trace_path(role)),
            },
        }
        return [*self._vllm(getattr(self.ports, role)), "--kv-transfer-config", json.dumps(connector)]

    def plain(self) -> list[str]:
        """vLLM without us. No prefix cache: each prompt is recomputed, as on any engine that never saw it."""
        return [*self._vllm(self.ports.plain), "--no-enable-prefix-caching"]

    def router(self) -> list[str]:
        return [
            _script("mooncake-router"),
            "--host", "127.0.0.1",
            "--port", str(self.ports.router),
            "--prefill", self.ports.url("prefill"),
            "--decode", self.ports.url("decode"),
        ]  # fmt: skip

    def _vllm(self, port: int) -> list[str]:
        return vllm_command(
            self.model_dir,
            port,
            dtype=self.dtype,
            max_model_len_tokens=MAX_MODEL_LEN_TOKENS,
            max_step_tokens=MAX_MODEL_LEN_TOKENS,
            max_running=8,
            kv_cache_bytes=KV_CACHE_BYTES,
        )


def vllm_command(
    model_dir: Path,
    port: int,
    *,
    dtype: str,
    max_model_len_tokens: int,
    max_step_tokens: int,
    max_running: int,
    kv_cache_bytes: int,
) -> list[str]:
    """An engine as everything here that compares engines starts it; with ENGINE_ENV."""
    return [
        _script("vllm"), "serve", str(model_dir),
        "--host", "127.0.0.1",
        "--port", str(port),
        "--served-model-name", MODEL_NAME,
        "--dtype", dtype,
        "--enforce-eager",
        "--distributed-executor-backend", "uni",
        "--block-size", str(BLOCK_SIZE_TOKENS),
        "--max-model-len", str(max_model_len_tokens),
        "--max-num-batched-tokens", str(max_step_tokens),
        "--max-num-seqs", str(max_running),
        "--kv-cache-memory-bytes", str(kv_cache_bytes),
        "--prefix-caching-hash-algo", "sha256_cbor",
    ]  # fmt: skip


def _script(name: str) -> str:
    return str(Path(sys.executable).parent / name)
