"""Rounds of turns: each policy over its engines, with a router of its own, asked the same questions."""

import json
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from demo_lib.cluster import BLOCK_SIZE_TOKENS, MODEL_NAME
from demo_lib.openai_client import Request, ask
from demo_lib.processes import DemoError, Processes, free_ports

from kvcore.config import read_file
from policiesbench.cluster import LOCAL, POLICIES, Cluster
from policiesbench.workload import Plan, Prompt, Sample, Turn, prompts, summed_up
from router.core.estimator import PrefillModel

_SETTLE_S = 1.0  # saves go on after the answers, events behind them
_ROUTER_TIMEOUT_S = 60.0
_BYTES_OF_FLOAT32 = 4


def profile(cluster: Cluster, model: Path, config: Path) -> PrefillModel:
    """Measures an engine as a user would, and writes the routers' `config`. DemoError when it cannot."""
    measured = subprocess.run(
        [
            *(sys.executable, "-m", "router.cli", "profile", "--url", cluster.engines[LOCAL][0].url),
            *("--model", MODEL_NAME, "--lengths", "256,768,1536", "--batches", "1,4", "--contexts", "64,512"),
            *("--decode-tokens", "16", "--repeats", "1", "--block-size", str(BLOCK_SIZE_TOKENS)),
            *("--vocabulary", "200"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if measured.returncode:
        raise DemoError(f"mooncake-router profile: {measured.stderr}")
    transfer = f"[scheduling.transfer_model]\nkv_bytes_per_token = {_kv_bytes_per_token(model)}\n"
    config.write_text(f"{measured.stdout}\n{transfer}")
    return PrefillModel(**read_file(config)["scheduling"]["prefill_model"])


def _kv_bytes_per_token(model: Path) -> int:
    shape = json.loads((model / "config.json").read_text())
    head_dim = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    return int(2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * head_dim * _BYTES_OF_FLOAT32)


def _salt(setup: str, policy: str) -> str:
    """Of one length, so that prompts have equally many tokens everywhere."""
    return f"{zlib.crc32(f'{setup} {policy}'.encode()) % 10_000:04}"


def order(round_number: int) -> Iterator[tuple[str, str]]:
    """Every (setup, policy); who begins changes with the round."""
    cells = [(setup, policy) for setup, policies in POLICIES.items() for policy in policies]
    first = 3 * round_number % len(cells)
    return iter([*cells[first:], *cells[:first]])


class Runner:
    """`progress` is called once an answer."""

    def __init__(
        self, processes: Processes, cluster: Cluster, config: Path, progress: Callable[[], object]
    ) -> None:
        self._processes, self._cluster, self._config, self._progress = processes, cluster, config, progress

    def turn(self, plan: Plan, setup: str, policy: str, number: int, texts: list[str], rate: float) -> Turn:
        """DemoError when a request fails."""
        asked = prompts(plan, texts, number, rate, f"{_salt(setup, policy)}-{number}")
        self._cluster.forget_prefixes(setup)
        port = free_ports(1)[0]
        flags = self._cluster.router_flags(setup, policy, self._config)
        command = [sys.executable, "-m", "router.cli", "--port", str(port), "--log-level", "warning", *flags]
        name = f"router-{policy}"
        router = self._processes.start(name, command, {})
        url = f"http://127.0.0.1:{port}"
        try:
            self._processes.wait_until_ready({name: f"{url}/ready"}, _ROUTER_TIMEOUT_S, lambda name: None)
            time.sleep(_SETTLE_S)  # ready means that one engine has been seen
            before = self._cluster.counted(setup)
            samples = self._ask_all(url, plan, asked)
            time.sleep(_SETTLE_S)
            cached, fetched = (
                now - then for now, then in zip(self._cluster.counted(setup), before, strict=True)
            )
        finally:
            self._processes.stop(router)
        return summed_up(setup, policy, number, samples, cached, fetched)

    def _ask_all(self, url: str, plan: Plan, asked: list[Prompt]) -> list[Sample]:
        began = time.monotonic()

        def one(prompt: Prompt) -> Sample:
            time.sleep(max(began + prompt.at_s - time.monotonic(), 0.0))
            body = {
                "model": MODEL_NAME,
                "prompt": prompt.text,
                "max_tokens": plan.max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
                "return_token_ids": True,
            }
            answer = ask(url, Request("/v1/completions", body))
            self._progress()
            assert answer.ttft_ms is not None  # it was streamed
            return Sample(answer.ttft_ms, answer.prompt_tokens)

        with ThreadPoolExecutor(len(asked)) as threads:
            return list(threads.map(one, asked))
