"""Runs: one, or many over processes."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import lru_cache
from pathlib import Path

import msgspec

from kvcore.errors import ConfigError
from kvsim.cluster import Cluster
from kvsim.config import SimConfig
from kvsim.job import Outcome
from kvsim.metrics import LoadSeries, Summary
from kvsim.recorded import read_lines, recorded_trace
from kvsim.trace import DEFAULT_BLOCK_SIZE_TOKENS, Trace, read_trace
from kvsim.workload import poisson_arrivals, replay_faster, synthesize, window
from router.core.recording import Write


class Result(msgspec.Struct, frozen=True):
    config: SimConfig
    summary: Summary
    outcomes: Sequence[Outcome]
    series: LoadSeries
    cpu_s: float


def load_trace(config: SimConfig) -> Trace:
    """What `config` says, windowed and scaled. ConfigError when it says nothing."""
    spec = config.trace
    if bool(spec.path) == (config.synthetic is not None):
        raise ConfigError("give either trace.path or a [synthetic] table")
    if config.synthetic is not None:
        trace = synthesize(config.synthetic, config.seed)
    else:
        trace = read_any(spec.path, spec.block_size_tokens)
    if spec.begin_s or spec.end_s:
        trace = window(trace, spec.begin_s, spec.end_s)
    if spec.poisson_rps:
        trace = poisson_arrivals(trace, spec.poisson_rps, config.seed)
    return replay_faster(trace, spec.speed)


@lru_cache(maxsize=2)
def read_any(path: str, block_size_tokens: int = DEFAULT_BLOCK_SIZE_TOKENS) -> Trace:
    """A trace, or a record of decisions; read once however many runs replay it."""
    if Path(path).suffix == ".record":
        return recorded_trace(read_lines(Path(path)), Path(path).stem)
    return read_trace(Path(path), block_size_tokens)


def simulate(
    config: SimConfig, progress: Callable[[int], None] | None = None, record: Write | None = None
) -> Result:
    began_s = time.process_time()
    cluster = Cluster(config, load_trace(config), record, progress)
    cluster.run()
    return Result(config, cluster.summary(), cluster.outcomes, cluster.series, time.process_time() - began_s)


def simulate_many(
    configs: Sequence[SimConfig],
    processes: int = 0,
    finished: Callable[[SimConfig], None] | None = None,
) -> list[Result]:
    """Results in the order of `configs`. `processes` 0: as many as there are CPUs; with 1 in this process."""
    processes = min(processes or os.cpu_count() or 1, max(len(configs), 1))
    results: dict[int, Result] = {}
    if processes == 1:
        for number, config in enumerate(configs):
            results[number] = simulate(config)
            if finished is not None:
                finished(config)
    else:
        # spawn: forking a process that has threads (progress bars) is not safe.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(processes, mp_context=context) as pool:
            numbers = {pool.submit(simulate, config): number for number, config in enumerate(configs)}
            for future in as_completed(numbers):
                results[numbers[future]] = future.result()
                if finished is not None:
                    finished(configs[numbers[future]])
    return [results[number] for number in range(len(configs))]
