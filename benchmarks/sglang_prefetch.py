"""From a request to its pages: SGLang's prefetch with our backend, its own `file`, and its `mooncake`.

    scripts/bench sglang [--quick] [--rounds N] [--only SHAPE] [--vs file,mooncake] [--json FILE]

Each storage has two engines (SGLang's host pool, cache controller and threads, without a model). The first
saves prompts; the second, which has seen none of them, prefetches them, and the time from the request to the
last page in its host pool is taken. Storages take turns within a round. Every byte is compared with what was
saved. Exit status 1: a wrong byte or a target missed.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from sglangbench.engines import EnginePair
from sglangbench.plan import OURS, PEERS, SHAPES, TARGET_RATIO, Shape
from storebench.processes import SystemFailed


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """`seconds` by system, one entry a round; the systems of a round were measured side by side."""

    shape: Shape
    seconds: dict[str, list[float]]
    left_out: dict[str, str]
    wrong: list[str]

    def gb_per_s(self, system: str) -> float:
        return self.shape.prompt_bytes / statistics.median(self.seconds[system]) / 1e9

    def ratio(self, peer: str) -> float:
        """How many times as fast ours is: the median over rounds of the ratio within one round."""
        pairs = zip(self.seconds[peer], self.seconds[OURS[0]], strict=True)
        return statistics.median(theirs / ours for theirs, ours in pairs)


def measure(shape: Shape, systems: Sequence[str], rounds: int, directory: Path) -> Measured:
    seconds: dict[str, list[float]] = {}
    left_out: dict[str, str] = {}
    wrong: list[str] = []
    with ExitStack() as stack:
        pairs: list[tuple[EnginePair, list[int]]] = []
        for system in systems:
            pair = EnginePair(system, shape, directory)
            stack.callback(pair.close)
            try:
                pair.start()
                digests = [pair.first.save(prompt) for prompt in range(shape.prompts)]
            except SystemFailed as error:
                left_out[system] = str(error)
                continue
            pairs.append((pair, digests))
            seconds[system] = []
        # The first turn of each prompt is thrown away: memory is touched, connections are made.
        for turn in range(-shape.prompts, rounds):
            shift = turn % len(pairs) if pairs else 0
            for pair, digests in pairs[shift:] + pairs[:shift]:
                prompt = turn % shape.prompts
                found = pair.second.prefetch(prompt)
                if (found.tokens, found.digest) != (shape.prompt_tokens, digests[prompt]):
                    wrong.append(f"{pair.name}, prompt {prompt}: {found.tokens} tokens")
                if turn >= 0:
                    seconds[pair.name].append(found.seconds)
    return Measured(shape=shape, seconds=seconds, left_out=left_out, wrong=wrong)


def show(console: Console, measured: Measured) -> bool:
    """Whether all is as it should be."""
    shape = measured.shape
    title = f"{shape.name}: {shape.prompt_tokens} tokens, {shape.prompt_bytes >> 20} MiB in pages of"
    table = Table(title=f"{title} {shape.page_bytes / (1 << 20):g} MiB", title_justify="left", box=None)
    for heading in ("storage", "median ms", "best ms", "worst ms", "GB/s", "ours is"):
        table.add_column(heading, justify="left" if heading == "storage" else "right")
    is_good = not measured.wrong
    for system, times in measured.seconds.items():
        ratio = measured.ratio(system) if OURS[0] in measured.seconds and system not in OURS else None
        verdict = ""
        if ratio is not None:
            is_good = is_good and ratio >= TARGET_RATIO
            verdict = f"{ratio:.2f} x as fast"
        row = [f"{seconds * 1e3:.1f}" for seconds in (statistics.median(times), min(times), max(times))]
        table.add_row(system, *row, f"{measured.gb_per_s(system):.2f}", verdict)
    console.print(table)
    for system, reason in measured.left_out.items():
        console.print(f"{system} left out: {reason}", markup=False)
    for line in measured.wrong:
        console.print(f"WRONG BYTES: {line}", style="bold red")
    return is_good


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="a quarter of each prompt, a third of the rounds"
    )
    parser.add_argument("--rounds", type=int, default=30, metavar="N", help="default: %(default)s")
    parser.add_argument("--only", choices=[shape.name for shape in SHAPES], help="one shape of KV")
    parser.add_argument(
        "--vs", default=",".join(PEERS), metavar="A,B", help="peers, of %(default)s (the default), or none"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="every figure")
    args = parser.parse_args(argv)
    peers = [] if args.vs == "none" else args.vs.split(",")
    if unknown := set(peers) - set(PEERS):
        parser.error(f"--vs: {', '.join(sorted(unknown))} is none of {', '.join(PEERS)}")
    if args.rounds < 1:
        parser.error("--rounds must be above 0")
    console = Console(highlight=False)
    is_good, found = True, []
    for shape in SHAPES:
        if args.only in (None, shape.name):
            with tempfile.TemporaryDirectory(prefix="sglang-bench-") as directory:
                wanted = shape.smaller() if args.quick else shape
                rounds = max(1, args.rounds // 3) if args.quick else args.rounds
                measured = measure(wanted, [*OURS, *peers], rounds, Path(directory))
            is_good = show(console, measured) and is_good
            found.append(msgspec.to_builtins(measured))
    if not is_good:
        console.print(f"not all is as it should be (target: {TARGET_RATIO} x the peers)", style="bold red")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
