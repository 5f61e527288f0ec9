"""Hit rate by eviction policy and capacity, replayed from a request trace.

    python benchmarks/eviction.py TRACE [--capacities 1000,10000,30000,50000] [--policies lru,sieve,...]
                                  [--rules plain|store] [--json FILE]

TRACE is JSON lines as in the public Mooncake traces: `hash_ids` names the blocks of a request in order, equal
ids at the same place being a shared prefix; `input_length` is in tokens. A hit is a block of the longest
leading run of blocks that are in the cache; what lies behind the first miss cannot be used.

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
from typing import Any, NamedTuple

from store_server.core.eviction import POLICIES, Evictable, EvictionPolicy

DEFAULT_BLOCK_SIZE_TOKENS = 512
DEFAULT_CAPACITIES = (1_000, 10_000, 30_000, 50_000)


class Block(NamedTuple):
    """What a policy sees of it; every block counts as one byte, so capacities are in blocks."""

    key: bytes
    parent: bytes | None
    size_tokens: int
    size_bytes: int = 1


class HitRate(NamedTuple):
    hit_blocks: int
    total_blocks: int
    hit_tokens: int
    total_tokens: int

    @property
    def of_blocks(self) -> float:
        return self.hit_blocks / self.total_blocks if self.total_blocks else 0.0

    @property
    def of_tokens(self) -> float:
        return self.hit_tokens / self.total_tokens if self.total_tokens else 0.0


Trace = list[list[Block]]


def read_trace(path: Path, block_size_tokens: int = DEFAULT_BLOCK_SIZE_TOKENS) -> Trace:
    """Requests in file order. SystemExit naming the line that cannot be read."""
    keys: dict[tuple[bytes | None, Any], bytes] = {}
    trace = []
    with path.open() as lines:
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
                hash_ids, input_length = record["hash_ids"], int(record["input_length"])
            except (ValueError, KeyError, TypeError) as error:
                sys.exit(f"{path}, line {number}: needs hash_ids and input_length ({error!r})")
            blocks: list[Block] = []
            for index, hash_id in enumerate(hash_ids):
                parent = blocks[-1].key if blocks else None
                key = keys.setdefault((parent, hash_id), len(keys).to_bytes(8, "big"))
                size_tokens = max(1, min(block_size_tokens, input_length - index * block_size_tokens))
                blocks.append(Block(key, parent, size_tokens))
            trace.append(blocks)
    return trace


class Replay:
    """One cache. `serve` answers how many leading blocks of a request were there, and keeps its blocks."""

    def __init__(self, policy: EvictionPolicy, capacity_blocks: int) -> None:
        self.policy = policy
        self.capacity_blocks = capacity_blocks
        self.num_evictions = 0

    def num_leading_hits(self, blocks: Sequence[Block]) -> int:
        for index, block in enumerate(blocks):
            if block.key not in self.policy:
                return index
        return len(blocks)

    def serve_plain(self, blocks: Sequence[Block]) -> int:
        num_hits = self.num_leading_hits(blocks)
        for block in blocks:
            if block.key in self.policy:
                self.policy.on_access([block.key])
            elif self._make_room(len(self.policy) + 1, lambda entry: True):
                self.policy.on_insert(block, block.parent)
        return num_hits

    def serve_as_store(self, blocks: Sequence[Block]) -> int:
        num_hits = self.num_leading_hits(blocks)
        self.policy.on_access(block.key for block in reversed(blocks[:num_hits]))
        own = {block.key for block in blocks}
        kept: list[Block] = []
        for block in blocks[num_hits:]:
            if block.key in self.policy:
                continue
            wanted_blocks = len(self.policy) + len(kept) + 1
            if not self._make_room(wanted_blocks, lambda entry: entry.key not in own):
                break
            kept.append(block)
        for block in reversed(kept):
            self.policy.on_insert(block, block.parent)
        return num_hits

    def _make_room(self, wanted_blocks: int, evictable: Callable[[Evictable], bool]) -> bool:
        while wanted_blocks > self.capacity_blocks:
            victim = self.policy.victim(evictable)
            if victim is None:
                return False
            self.policy.on_remove(victim.key, evicted=True)
            self.num_evictions += 1
            wanted_blocks -= 1
        return True


RULES: dict[str, Callable[[Replay, Sequence[Block]], int]] = {
    "plain": Replay.serve_plain,
    "store": Replay.serve_as_store,
}


def replay(
    trace: Trace, policy_name: str, capacity_blocks: int, rules: str = "plain", num_warmup_requests: int = 0
) -> HitRate:
    """The hit rate over all requests but the first `num_warmup_requests`, which only fill the cache."""
    cache, serve = Replay(POLICIES[policy_name](), capacity_blocks), RULES[rules]
    hit_blocks = total_blocks = hit_tokens = total_tokens = 0
    for number, blocks in enumerate(trace):
        num_hits = serve(cache, blocks)
        if number >= num_warmup_requests:
            hit_blocks += num_hits
            total_blocks += len(blocks)
            hit_tokens += sum(block.size_tokens for block in blocks[:num_hits])
            total_tokens += sum(block.size_tokens for block in blocks)
    return HitRate(hit_blocks, total_blocks, hit_tokens, total_tokens)


def num_distinct_blocks(trace: Trace) -> int:
    return len({block.key for blocks in trace for block in blocks})


def measure(
    trace: Trace, policies: Sequence[str], capacities: Sequence[int], rules: str
) -> Iterator[tuple[str, list[float], float]]:
    """(policy, block hit rate of each capacity, seconds it took)."""
    for name in policies:
        begin_s = time.perf_counter()
        rates = [replay(trace, name, capacity, rules).of_blocks for capacity in capacities]
        yield name, rates, time.perf_counter() - begin_s


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--capacities", default=",".join(map(str, DEFAULT_CAPACITIES)), help="in blocks")
    parser.add_argument("--policies", help=f"of {', '.join(POLICIES)}")
    parser.add_argument("--rules", choices=list(RULES), default="plain")
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
    options.capacities = [int(capacity) for capacity in options.capacities.split(",")]
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    trace = read_trace(options.trace, options.block_size_tokens)
    distinct_blocks = num_distinct_blocks(trace)
    total_blocks = sum(map(len, trace))
    ideal = replay(trace, "lru", max(distinct_blocks, 1)).of_blocks
    print(f"{options.trace.name}: {len(trace)} requests, {total_blocks} blocks, {distinct_blocks} distinct")
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
            "num_requests": len(trace),
            "num_blocks": total_blocks,
            "num_distinct_blocks": distinct_blocks,
            "ideal": ideal,
            "hit_rate": figures,
        }
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
