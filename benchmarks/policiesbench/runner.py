"""Rounds of turns: each cell's router asked the same questions, one cell after the other."""

import asyncio
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

from demo_lib.cluster import BLOCK_SIZE_TOKENS, MODEL_NAME
from demo_lib.processes import DemoError

from kvcore.config import read_file
from policiesbench.cells import Cell
from policiesbench.client import ask_all
from policiesbench.cluster import Cluster, Model
from policiesbench.figures import Turn, summed_up
from policiesbench.workload import Plan, Prompt, prompts
from router.core.estimator import PrefillModel

_SETTLE_S = 1.0  # saves go on after the answers, events behind them
_WARM_UP = 2  # prompts for each engine and through each router, before anything counts


def profile(cluster: Cluster, model: Model, plan: Plan, config: Path) -> PrefillModel:
    """Measures an engine as a user would, and writes the routers' `config`. DemoError when it cannot."""
    tokens = model.document_tokens(plan)
    lengths = ",".join(str(tokens // part) for part in (4, 2, 1))
    measured = subprocess.run(
        [
            *(sys.executable, "-m", "router.cli", "profile", "--url", cluster.first_engine.url),
            *("--model", MODEL_NAME, "--lengths", lengths, "--batches", "1,2", "--contexts", "64,512"),
            *("--decode-tokens", "16", "--repeats", "2", "--block-size", str(BLOCK_SIZE_TOKENS)),
            *("--vocabulary", "200"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if measured.returncode:
        raise DemoError(f"mooncake-router profile: {measured.stderr}")
    transfer = f"[scheduling.transfer_model]\nkv_bytes_per_token = {model.kv_bytes_per_token}\n"
    config.write_text(f"{measured.stdout}\n{transfer}")
    return PrefillModel(**read_file(config)["scheduling"]["prefill_model"])


def _salt(cell: Cell) -> str:
    """Of one length, so that prompts have equally many tokens everywhere."""
    return f"{zlib.crc32(f'{cell.engines} {cell.routed}'.encode()) % 10_000:04}"


class Runner:
    """`progress` is called once an answer. DemoError when a request fails."""

    def __init__(
        self, cluster: Cluster, plan: Plan, texts: Sequence[str], progress: Callable[[], object]
    ) -> None:
        self._cluster, self._plan, self._texts, self._progress = cluster, plan, texts, progress

    def warm_up(self) -> None:
        """The first prompts of an engine, a connector or a router that tokenises take longer than others."""
        for url in self._cluster.urls():
            head = f"{url} is warming up. {self._texts[0][: self._plan.document_bytes]}"
            asked = [Prompt(0.0, f"{number} {head}") for number in range(_WARM_UP)]
            asyncio.run(ask_all(url, asked, self._plan.max_tokens, lambda: None))

    def turn(self, cell: Cell, number: int, rate_per_s: float) -> Turn:
        salt = f"{_salt(cell)}-{number:02}"
        asked = prompts(self._plan, self._texts, number, rate_per_s, salt)
        self._cluster.forget_prefixes(cell.engines)
        time.sleep(_SETTLE_S)
        before = self._cluster.counted(cell)
        url = self._cluster.router_url(cell)
        samples = asyncio.run(ask_all(url, asked, self._plan.max_tokens, self._progress))
        time.sleep(_SETTLE_S)
        counted = self._cluster.counted(cell)
        cached, fetched = (now - then for now, then in zip(counted, before, strict=True))
        return summed_up(cell.engines, cell.routed, number, samples, cached, fetched)
