"""Hit rate by eviction policy and capacity, replayed from a request trace.

    python benchmarks/eviction.py TRACE [--capacities 1000,10000,30000,50000] [--policies lru,sieve,...]
                                  [--rules plain|store] [--json FILE]

TRACE is one that mooncake-sim reads: `hash_ids` names the blocks of a request in order. A hit is a block of
the longest leading run of blocks that are in the cache; what lies behind the first miss cannot be used.

Two sets of rules. `plain` is the textbook: blocks are used and inserted from first to last, any block may go.
`store` is what our store does, and also what the package kvcache-simulator does: blocks count as used from
last to first, those of the request in hand are protected, and when there is no room for a block the rest of
its request is not kept.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from kvcore.errors import ConfigError
from kvsim.block_cache import BlockCache
from kvsim.hit_rate import Cache, replay
from kvsim.trace import DEFAULT_BLOCK_SIZE_TOKENS, Trace, read_trace
from store_server.core.eviction import POLICIES

DEFAULT_CAPACITIES = (1_000, 10_000, 30_000, 50_000)


class Block(NamedTuple):
    """What a policy sees of it; every block counts as one byte, so capacities are in blocks."""

    key: bytes
    size_bytes: int = 1


class PlainCache:
    """The textbook's rules."""

    def __init__(self, policy_name: str, capacity_blocks: int) -> None:
        self.policy = POLICIES[policy_name]()
        self.capacity_blocks = capacity_blocks

    def leading(self, keys: Sequence[bytes]) -> tuple[int, int]:
        held = next((index for index, key in enumerate(keys) if key not in self.policy), len(keys))
        return held, 0

    def keep(self, keys: Sequence[bytes]) -> None:
        parent: bytes | None = None
        for key in keys:
            if key in self.policy:
                self.policy.on_access([key])
            elif self._make_room():
                self.policy.on_insert(Block(key), parent)
            parent = key

    def _make_room(self) -> bool:
        while len(self.policy) >= self.capacity_blocks:
            victim = self.policy.victim(lambda entry: True)
            if victim is None:
                return False
            self.policy.on_remove(victim.key, evicted=True)
        return True


RULES: dict[str, Callable[[str, int], Cache]] = {"plain": PlainCache, "store": BlockCache}


def measure(
    trace: Trace, policies: Sequence[str], capacities: Sequence[int], rules: str
) -> Iterator[tuple[str, list[float], float]]:
    """(policy, block hit rate of each capacity, seconds it took)."""
    for name in policies:
        begin_s = time.perf_counter()
        rates = [replay(trace, RULES[rules](name, capacity)).of_blocks for capacity in capacities]
        yield name, rates, time.perf_counter() - begin_s


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--capacities", default=",".join(map(str, DEFAULT_CAPACITIES)), help="in blocks")
    parser.add_argument(
        "--policies",
        help=f"of {', '.join(POLICIES)}; by default all, under plain rules those without prefix_",
    )
    parser.add_argument("--rules", choices=list(RULES), default="plain", help="(default: plain)")
    parser.add_argument("--block-size-tokens", type=int, default=DEFAULT_BLOCK_SIZE_TOKENS)
    parser.add_argument("--json", type=Path, help="also write the figures there")
    options = parser.parse_args(arguments)
    # Under the plain rules a block is used before those behind it, which leaves leaf-first orders long
    # searches.
    every = [name for name in POLICIES if options.rules == "store" or not name.startswith("prefix_")]
    options.policies = options.policies.split(",") if options.policies else every
    unknown = set(options.policies) - set(POLICIES)
    if unknown:
        parser.error(f"unknown policy {', '.join(sorted(unknown))}; there are {', '.join(POLICIES)}")
    try:
        options.capacities = [int(capacity) for capacity in options.capacities.split(",")]
    except ValueError:
        parser.error(f"--capacities are numbers of blocks, not {options.capacities!r}")
    if min(options.capacities) < 1:
        parser.error("--capacities must be 1 block or more")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    try:
        trace = read_trace(options.trace, options.block_size_tokens)
    except ConfigError as error:
        sys.exit(str(error))
    num_requests, total_blocks = len(trace.requests), trace.num_blocks
    distinct_blocks = trace.num_distinct_blocks
    ideal = replay(trace, BlockCache("lru", max(distinct_blocks, 1))).of_blocks
    print(f"{options.trace.name}: {num_requests} requests, {total_blocks} blocks, {distinct_blocks} distinct")
    print(f"rules: {options.rules}; no cache of any size does better than {ideal:.3f}")
    print(f"{'policy':<22}" + "".join(f"{capacity:>10,}" for capacity in options.capacities) + "   seconds")
    figures = {}
    for name, rates, elapsed_s in measure(trace, options.policies, options.capacities, options.rules):
        figures[name] = dict(zip(map(str, options.capacities), rates, strict=True))
        print(f"{name:<22}" + "".join(f"{rate:>10.3f}" for rate in rates) + f"{elapsed_s:>10.1f}", flush=True)
    if options.json:
        result = {
            "trace": options.trace.name,
            "rules": options.rules,
            "num_requests": num_requests,
            "num_blocks": total_blocks,
            "num_distinct_blocks": distinct_blocks,
            "ideal": ideal,
            "hit_rate": figures,
        }
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
