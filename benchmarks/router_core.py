"""What the router's decisions cost: prefix index, Algorithm 1, bookkeeping. One process, no network.

    python -m benchmarks.router_core [--blocks 1000000] [--json FILE]      (from the repository's root)

Times are the best of several repetitions of CPU time per operation: what the code needs, whatever else the
machine does. The bar of each figure stands beside it.
"""

import argparse
import gc
import json
import math
import sys
import time
import tracemalloc
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from kvcore.wire.events import BlockRemoved, BlockStored, Event, decode_batch, encode_batch
from router.core.block_hash import block_hashes, text_block_hashes
from router.core.cluster_book import ClusterBook
from router.core.policies import make_policy
from router.core.prefix_index import PrefixIndex
from router.core.prng import SplitMix64
from router.core.scheduler import Scheduler
from router.core.settings import Settings
from router.core.view import ClusterView, RequestView, Role

BLOCK_TOKENS = 16
PROMPT_BLOCKS = 512
WORKERS = 64
VOCABULARY = 150_000
prng = SplitMix64(1)


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


def tokens(count: int) -> list[int]:
    return [prng.below(VOCABULARY) for _ in range(count)]


def names(count: int) -> list[int]:
    return [prng.next_u64() for _ in range(count)]


def index_with(depths: Sequence[int], prompt: Sequence[int], engine_hashes: Sequence[int]) -> PrefixIndex:
    index = PrefixIndex(BLOCK_TOKENS)
    for number, depth in enumerate(depths):
        worker = index.add_worker(f"w{number}", shared=True)
        if depth:
            stored = BlockStored(engine_hashes[:depth], None, prompt[: depth * BLOCK_TOKENS], BLOCK_TOKENS)
            index.apply(worker, [stored])
    return index


def ingest(blocks_per_batch: int, batches: int) -> float:
    """Batches decoded and applied per CPU second, each one BlockStored of a growing chain, every fourth
    followed by its removal, as under cache pressure."""
    payloads: list[bytes] = []
    parent = None
    for number in range(batches):
        hashes = names(blocks_per_batch)
        parent = None if number % 64 == 0 else parent
        events: list[Event] = [
            BlockStored(hashes, parent, tokens(BLOCK_TOKENS * blocks_per_batch), BLOCK_TOKENS)
        ]
        if number % 4 == 3:
            events.append(BlockRemoved(hashes[::-1]))
        else:
            parent = hashes[-1]
        payloads.append(encode_batch(1.0, events, 0))
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
    chains = [(names(PROMPT_BLOCKS), array("I", tokens(256))) for _ in range(num_blocks // PROMPT_BLOCKS)]
    gc.collect()
    tracemalloc.start()
    index = PrefixIndex(BLOCK_TOKENS, max_size_bytes=sys.maxsize)
    worker = index.add_worker("w")
    before = tracemalloc.get_traced_memory()[0]
    for number, (hashes, some) in enumerate(chains):
        prompt = [number, *some[1:]] * (PROMPT_BLOCKS * BLOCK_TOKENS // 256)
        index.apply(worker, [BlockStored(list(hashes), None, prompt, BLOCK_TOKENS)])
    del chains
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    # The hashes themselves were allocated before: the index keeps them alive (an int of 64 bits is 48 bytes).
    used += 48 * index.table.num_blocks
    return used / index.table.num_blocks, index.size_bytes / index.table.num_blocks


def scheduling(instances: int, admission: str) -> tuple[Scheduler, RequestView, ClusterView, ClusterBook]:
    """Algorithm 1 over `instances` x `instances` with a third of them holding prefixes of four lengths."""
    settings = Settings(admission=admission, ttft_slo_ms=1e9, tbt_slo_ms=1e9)
    prompt, engine_hashes = tokens(PROMPT_BLOCKS * BLOCK_TOKENS), names(PROMPT_BLOCKS)
    index = PrefixIndex(BLOCK_TOKENS)
    book = ClusterBook(settings, index)
    for number in range(instances):
        worker = book.add_instance(f"p{number}", Role.PREFILL, is_shared=True)
        book.add_instance(f"d{number}", Role.DECODE, kv_capacity_tokens=1 << 20)
        if number % 3 == 0:
            depth = (512, 100, 256, 400)[number % 4]
            stored = BlockStored(engine_hashes[:depth], None, prompt[: depth * BLOCK_TOKENS], BLOCK_TOKENS)
            index.apply(worker, [stored])
    for number in range(32 * instances):
        book.forecast.add(f"r{number}", prng.below(30), 8192, 300, 20.0)
    view = book.view(0.0)
    busy = [
        msgspec.structs.replace(
            state, prefill_free_at=prng.below(1000) / 1e3, running_requests=prng.below(40)
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
    prompt, engine_hashes = tokens(PROMPT_BLOCKS * BLOCK_TOKENS), names(PROMPT_BLOCKS)
    own = block_hashes(prompt, BLOCK_TOKENS)
    figures = [
        Figure("index: batches of 1 block", ingest(1, 8000), "batches/s", 50_000),
        Figure("index: batches of 8 blocks", ingest(8, 4000), "batches/s", 50_000),
    ]
    four_depths = [(512, 100, 256, 400)[n % 4] for n in range(WORKERS)]
    for what, depths, bar in (
        ("all hold all", [PROMPT_BLOCKS] * WORKERS, 10.0),
        ("4 different depths", four_depths, 10.0),
        ("64 different depths", [8 * (n + 1) for n in range(WORKERS)], None),
    ):
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


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=1_000_000, help="blocks for the memory figure")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    arguments = parser.parse_args()
    figures = measure(arguments.blocks)
    for figure in figures:
        bar = "" if figure.bar is None else f"  bar {figure.bar:,.0f}  {'met' if figure.is_met else 'MISSED'}"
        print(f"{figure.name:52} {figure.value:12,.1f} {figure.unit:12}{bar}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(msgspec.to_builtins(figures), indent=2))
    return 0 if all(figure.is_met is not False for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
