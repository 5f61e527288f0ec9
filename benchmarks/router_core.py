"""What the router's decisions cost: prefix index, Algorithm 1, bookkeeping. One process, no network.

    scripts/bench router_core [--blocks 1000000] [--json FILE]
    scripts/bench router_core --vs dynamo [--rounds 3]

Times are the best of several repetitions of CPU time per operation: what the code needs, whatever else the
machine does. The bar of each figure stands beside it.

With --vs a peer's core does the same in the same rounds: events over ZMQ, lookups, hashes, choosing an
instance, memory, and what it believes after restarts, gaps and odd events. Each is a process of its own whose
CPU time, of all its threads, is what counts; ours is measured in plain Python and compiled.
"""

import argparse
import gc
import json
import math
import os
import random
import sys
import tempfile
import time
import tracemalloc
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from corebench.inputs import (
    BLOCK_TOKENS,
    PROMPT_BLOCKS,
    WORKERS,
    growing_chains,
    inputs,
    random_names,
    random_tokens,
    stored,
)
from corebench.report import print_figures, print_outcomes
from corebench.runner import Budget, Runner
from corebench.systems import PEERS, SYSTEMS
from machine import machine_record
from rich.console import Console

from kvcore.wire.events import decode_batch
from router.core.block_hash import block_hashes, text_block_hashes
from router.core.cluster_book import ClusterBook
from router.core.policies import make_policy
from router.core.prefix_index import PrefixIndex
from router.core.scheduler import Scheduler
from router.core.settings import Settings
from router.core.view import ClusterView, RequestView, Role

_WIDTH_IN_A_PIPE = 160
rng = random.Random(1)


class Figure(msgspec.Struct, frozen=True):
    """`bar`: at most for times and sizes, at least for rates; None where none was set."""

    name: str
    value: float
    unit: str
    bar: float | None = None

    @property
    def is_met(self) -> bool | None:
        if self.bar is None:
            return None
        return self.value >= self.bar if self.unit.endswith("/s") else self.value <= self.bar


def cpu_us(operation: Callable[[], object], repetitions: int = 7, min_s: float = 0.05) -> float:
    """Best CPU microseconds of one call."""
    number, best = 1, math.inf
    while True:
        started = time.process_time()
        for _ in range(number):
            operation()
        spent = time.process_time() - started
        if spent >= min_s / 4:
            break
        number *= 4
    for _ in range(repetitions):
        started = time.process_time()
        for _ in range(number):
            operation()
        best = min(best, (time.process_time() - started) / number)
    return best * 1e6


def index_with(depths: Sequence[int], prompt: list[int], engine_hashes: list[int]) -> PrefixIndex:
    index = PrefixIndex(BLOCK_TOKENS)
    for number, depth in enumerate(depths):
        worker = index.add_worker(f"w{number}", shared=True)
        if depth:
            index.apply(worker, [stored(engine_hashes[:depth], prompt[: depth * BLOCK_TOKENS])])
    return index


def ingest(blocks_per_batch: int, batches: int) -> float:
    """Batches decoded and applied per CPU second."""
    payloads = list(growing_chains(1, blocks_per_batch, batches))
    best = math.inf
    for _ in range(5):
        index = PrefixIndex(BLOCK_TOKENS)
        worker = index.add_worker("w")
        started = time.process_time()
        for payload in payloads:
            index.apply(worker, decode_batch(payload).events)
        best = min(best, time.process_time() - started)
    return batches / best


def memory(num_blocks: int) -> tuple[float, float]:
    """(bytes per block really used, bytes per block accounted) of an index with that many blocks."""
    chains = [
        (random_names(rng, PROMPT_BLOCKS), array("I", random_tokens(rng, 256)))
        for _ in range(num_blocks // PROMPT_BLOCKS)
    ]
    gc.collect()
    tracemalloc.start()
    index = PrefixIndex(BLOCK_TOKENS, max_size_bytes=sys.maxsize)
    worker = index.add_worker("w")
    before = tracemalloc.get_traced_memory()[0]
    for number, (hashes, some) in enumerate(chains):
        prompt = [number, *some[1:]] * (PROMPT_BLOCKS * BLOCK_TOKENS // 256)
        index.apply(worker, [stored(list(hashes), prompt)])
    del chains
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    # The hashes themselves were allocated before: the index keeps them alive (an int of 64 bits is 48 bytes).
    used += 48 * index.table.num_blocks
    return used / index.table.num_blocks, index.size_bytes / index.table.num_blocks


def scheduling(instances: int, admission: str) -> tuple[Scheduler, RequestView, ClusterView, ClusterBook]:
    """Algorithm 1 over `instances` x `instances` with a third of them holding prefixes of four lengths."""
    settings = Settings(admission=admission, ttft_slo_ms=1e9, tbt_slo_ms=1e9)
    given = inputs()
    prompt, engine_hashes = given.token_ids, given.names
    index = PrefixIndex(BLOCK_TOKENS)
    book = ClusterBook(settings, index)
    for number in range(instances):
        worker = book.add_instance(f"p{number}", Role.PREFILL, is_shared=True)
        book.add_instance(f"d{number}", Role.DECODE, kv_capacity_tokens=1 << 20)
        if number % 3 == 0:
            depth = (512, 100, 256, 400)[number % 4]
            index.apply(worker, [stored(engine_hashes[:depth], prompt[: depth * BLOCK_TOKENS])])
    for number in range(32 * instances):
        book.forecast.add(f"r{number}", rng.randrange(30), 8192, 300, 20.0)
    view = book.view(0.0)
    busy = [
        msgspec.structs.replace(
            state, prefill_free_at=rng.randrange(1000) / 1e3, running_requests=rng.randrange(40)
        )
        for state in (*view.prefill, *view.decode)
    ]
    view = msgspec.structs.replace(view, prefill=tuple(busy[:instances]), decode=tuple(busy[instances:]))
    scheduler = Scheduler(
        make_policy("global_cache_aware", settings), make_policy("least_tbt", settings), settings
    )
    request = RequestView("r", len(prompt) + 1, block_hashes(prompt, BLOCK_TOKENS), 300)
    return scheduler, request, view, book


def bookkeeping() -> float:
    """CPU microseconds of everything the book does for one request, two views included."""
    scheduler, request, view, book = scheduling(16, "none")
    decision = scheduler.schedule(request, view, 0.0)
    assert decision.prefill is not None

    def one_request() -> None:
        book.sent(request, decision, 1.0)
        book.view(1.0)
        book.first_token("r", 1.1)
        book.ended("r", 2.0, 100)
        book.view(2.0)

    return cpu_us(one_request)


def measure(num_blocks: int) -> list[Figure]:
    given = inputs()
    prompt, engine_hashes = given.token_ids, given.names
    own = block_hashes(prompt, BLOCK_TOKENS)
    figures = [
        Figure("index: batches of 1 block", ingest(1, 8000), "batches/s", 50_000),
        Figure("index: batches of 8 blocks", ingest(8, 4000), "batches/s", 50_000),
    ]
    for what, bar in (("all hold all", 10.0), ("4 different depths", 10.0), ("64 different depths", None)):
        depths = given.depths[what]
        index = index_with(depths, prompt, engine_hashes)
        spent = cpu_us(partial(index.match, own, 0.0))
        figures.append(Figure(f"lookup 512 blocks, 64 workers, {what}", spent, "us", bar))
    miss = [h ^ 1 for h in own]
    figures.append(Figure("lookup 512 blocks, miss", cpu_us(lambda: index.match(miss, 0.0)), "us", 10.0))
    figures.append(Figure("predicted placement, 512 blocks", cpu_us(lambda: index.place(0, own, 0.0)), "us"))
    for size, bar in ((16, None), (WORKERS, 50.0)):
        scheduler, request, view, _ = scheduling(size, "none")
        spent = cpu_us(partial(scheduler.schedule, request, view, 0.0))
        figures.append(Figure(f"Algorithm 1, {size} x {size}, lookup included", spent, "us", bar))
    for admission in ("early", "predictive", "predictive_request"):
        scheduler, request, view, _ = scheduling(WORKERS, admission)
        spent = cpu_us(partial(scheduler.schedule, request, view, 0.0))
        figures.append(Figure(f"  with admission {admission}, 2048 under way", spent, "us"))
    figures.append(Figure("bookkeeping of one request, 16 x 16", bookkeeping(), "us"))
    figures.append(Figure("hash 8,192 token ids", cpu_us(lambda: block_hashes(prompt, BLOCK_TOKENS)), "us"))
    text = bytes(32 << 10)
    figures.append(Figure("hash 32 KiB of text", cpu_us(lambda: text_block_hashes(text, 256)), "us"))
    used, accounted = memory(num_blocks)
    figures.append(Figure(f"index memory, {num_blocks:,} blocks", used, "bytes/block", accounted))
    return figures


def compare(peers: Sequence[str], rounds: int, num_blocks: int) -> tuple[int, dict[str, Any]]:
    """(exit status, everything for a JSON file): 1 when ours could not be measured or did anything wrong."""
    systems = [*SYSTEMS, *(PEERS[name] for name in peers)]
    load_before = os.getloadavg()[0]
    console = Console() if sys.stdout.isatty() else Console(width=_WIDTH_IN_A_PIPE)
    with tempfile.TemporaryDirectory(prefix="router_core.") as folder:
        runner = Runner(systems, Path(folder), lambda text: print(text, file=sys.stderr, flush=True))
        runner.run(Budget(rounds=rounds, memory_blocks=num_blocks))
    names = [system.name for system in systems]
    print_figures(console, runner.figures, names)
    print_outcomes(console, runner.outcomes, names)
    for system in systems:
        console.print(f"{system.name}: {system.about}", style="dim", highlight=False)
    for name, reason in runner.failed.items():
        console.print(f"[red]{name} was left out:[/] {reason}", highlight=False)
    ours = {system.name for system in SYSTEMS}
    is_wrong = any(outcome.system in ours and not outcome.is_right for outcome in runner.outcomes)
    return int(is_wrong or not ours.isdisjoint(runner.failed)), {
        "systems": {system.name: system.about for system in systems},
        "machine": machine_record(load_before),
        "figures": msgspec.to_builtins(runner.figures),
        "behaviour": msgspec.to_builtins(runner.outcomes),
        "left_out": runner.failed,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=1_000_000, help="blocks for the memory figure")
    parser.add_argument("--vs", action="append", choices=list(PEERS), default=[], help="measure beside it")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="with --vs (default: 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    arguments = parser.parse_args()
    document: Any
    if arguments.vs:
        status, document = compare(arguments.vs, arguments.rounds, arguments.blocks)
    else:
        figures = measure(arguments.blocks)
        for figure in figures:
            bar = (
                ""
                if figure.bar is None
                else f"  bar {figure.bar:,.0f}  {'met' if figure.is_met else 'MISSED'}"
            )
            print(f"{figure.name:52} {figure.value:12,.1f} {figure.unit:12}{bar}")
        status = int(any(figure.is_met is False for figure in figures))
        document = msgspec.to_builtins(figures)
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
