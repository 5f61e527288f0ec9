"""Hit rates of kvsim beside those of the package kvcache-simulator, trace by trace.

    python benchmarks/hit_rate_parity.py TRACE... [--capacities-gib 64,256,1024,4096]

Capacities are DRAM for the KV of a model with 327,680 bytes a token (LLaMA3-70B, bfloat16), blocks of 512
tokens; the first half of each trace only fills the cache, as that package does it. Exit status 1 when any two
rates are more than 0.1 point apart.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kvcache_sim.plan import build_execution_plan
from kvcache_sim.policies import simulate_policy
from kvcache_sim.trace import parse_trace_file

from kvsim.hit_rate import hit_rate
from kvsim.trace import read_trace

BLOCK_BYTES = 512 * 327_680
TOLERANCE = 0.001


def compare(path: Path, capacities_gib: Sequence[int]) -> float:
    """The largest difference of hit rates, both printed."""
    plan = build_execution_plan(parse_trace_file(path, block_size=512))
    trace = read_trace(path)
    worst = 0.0
    for gib in capacities_gib:
        blocks = (gib << 30) // BLOCK_BYTES
        theirs = simulate_policy(plan, "lru", blocks)
        if theirs.measurementMode != "fixed_window":
            print(f"{path.name:32} {gib:>6} GiB  never full: kvcache-simulator measures nothing")
            continue
        their_rate = theirs.hitTokens / theirs.totalTokens
        our_rate = hit_rate(trace, "lru", blocks, plan.warmup_requests).of_tokens
        worst = max(worst, abs(their_rate - our_rate))
        print(f"{path.name:32} {gib:>6} GiB  kvcache-simulator {their_rate:.4f}  kvsim {our_rate:.4f}")
    return worst


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", type=Path, nargs="+", metavar="TRACE")
    parser.add_argument("--capacities-gib", default="64,256,1024,4096")
    options = parser.parse_args(arguments)
    capacities = [int(gib) for gib in options.capacities_gib.split(",")]
    worst = max([compare(path, capacities) for path in options.traces])
    print(f"largest difference: {100 * worst:.3f} points")
    return 0 if worst <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
