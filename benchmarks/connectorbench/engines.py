"""A system's engines and its router: started, asked, ended by process id."""

import json
import re
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from demo_lib.cluster import ENGINE_ENV, vllm_command
from demo_lib.measure import external_hits
from demo_lib.openai_client import Answer, Request, ask
from demo_lib.processes import DemoError, Processes, free_ports
from demo_lib.workload import GREEDY, STREAM

from connectorbench.systems import Site, System

# In float32 a prompt that is computed in two parts gives the tokens of one computed whole.
_DTYPE = "float32"
_MAX_MODEL_LEN_TOKENS = 2048
_STEP_TOKENS = 512  # a long prompt takes several steps, and streams get a token in each
_KV_CACHE_BYTES = 192 << 20
_ENGINE_BYTES = 1300 << 20  # its two processes, without weights and KV cache
_START_TIMEOUT_S = 600.0
_RESET_TIMEOUT_S = 30.0
_ENVIRONMENT = {**ENGINE_ENV, "VLLM_SERVER_DEV_MODE": "1"}  # /reset_prefix_cache


class Engine(NamedTuple):
    url: str

    def ask(self, prompt: str, max_tokens: int) -> Answer:
        """Greedily; DemoError for less than a whole answer."""
        body = {**GREEDY, **STREAM, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
        answer = ask(self.url, Request("/v1/completions", body))
        if answer.ttft_ms is None or len(answer.token_ids) != max_tokens:
            raise DemoError(f"{self.url} answered {len(answer.token_ids)} tokens of {max_tokens}")
        return answer

    def loaded_tokens(self) -> int:
        return external_hits(self.url)

    def reset(self) -> None:
        """Forgets its own prefixes; DemoError when something holds them for too long."""
        deadline = time.monotonic() + _RESET_TIMEOUT_S
        while True:
            request = urllib.request.Request(f"{self.url}/reset_prefix_cache", b"", method="POST")
            with urllib.request.urlopen(request, timeout=60) as answer:
                if json.load(answer)["success"]:
                    return
            if time.monotonic() > deadline:
                raise DemoError(f"{self.url} holds blocks {_RESET_TIMEOUT_S:.0f} s after its last request")
            time.sleep(0.1)


class Engines(NamedTuple):
    """`first` computes and saves, `second` loads; `router` has them as prefill and decode."""

    first: Engine
    second: Engine | None
    router: Engine | None


@contextmanager
def started(system: System, model: Path, folder: Path, *, two: bool) -> Iterator[Engines]:
    """SystemFailed, DemoError or a CalledProcessError of an installation when something does not come up."""
    folder.mkdir()
    _check_memory(model, engines=2 if two else 1)
    *ports, router_port, bootstrap_port = free_ports(4)
    site = Site(folder, bootstrap_port)
    with system.settings(site) as setting_of, Processes(folder) as processes:
        roles = ("prefill", "decode") if two else ("prefill",)
        urls = {}
        for role, port in zip(roles, ports, strict=False):
            command = vllm_command(
                model,
                port,
                dtype=_DTYPE,
                max_model_len_tokens=_MAX_MODEL_LEN_TOKENS,
                max_step_tokens=_STEP_TOKENS,
                max_running=4,
                kv_cache_bytes=_KV_CACHE_BYTES,
            )
            setting = setting_of(role)
            if setting.transfer:
                command += ["--kv-transfer-config", json.dumps(setting.transfer)]
            # vLLM and some peers leave sockets and files behind in TMPDIR; there they go with the folder.
            environment = {**_ENVIRONMENT, "TMPDIR": str(folder), **setting.environment}
            processes.start(role, command, environment)
            urls[role] = f"http://127.0.0.1:{port}"
        health = {role: f"{url}/health" for role, url in urls.items()}
        processes.wait_until_ready(health, _START_TIMEOUT_S, lambda name: None)
        router = None
        if system.pd_protocol and two:
            command = [sys.executable, "-m", "router.cli", "--port", str(router_port)]
            command += ["--log-level", "warning"]
            command += ["--prefill", urls["prefill"], str(bootstrap_port), "--decode", urls["decode"]]
            command += ["--pd-protocol", system.pd_protocol]
            processes.start("router", command, {})
            router = Engine(f"http://127.0.0.1:{router_port}")
            processes.wait_until_ready({"router": f"{router.url}/ready"}, 60.0, lambda name: None)
        second = Engine(urls["decode"]) if two else None
        yield Engines(Engine(urls["prefill"]), second, router)


def _check_memory(model: Path, engines: int) -> None:
    """The kernel would end a process of anybody's."""
    # Loaded as float32 they are at most twice as large as on disk.
    weights_bytes = 2 * sum(file.stat().st_size for file in model.glob("*.safetensors"))
    needed_bytes = engines * (_ENGINE_BYTES + _KV_CACHE_BYTES + weights_bytes)
    if (free_bytes := available_bytes()) < needed_bytes:
        wanted, there = (f"{number / (1 << 30):.1f} GiB" for number in (needed_bytes, free_bytes))
        raise DemoError(f"{engines} engine(s) take {wanted} of memory, and {there} are available")


def available_bytes() -> int:
    """What the kernel says can be had without swapping."""
    found = re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())
    return int(found[1]) << 10 if found else 0


def logs_in(folder: Path) -> str:
    """What processes of a system have written, that of the one that wrote last at the end."""
    logs = sorted(folder.glob("*.log"), key=lambda log: log.stat().st_mtime)
    return "".join(log.read_text(errors="replace") for log in logs)
