"""benchmarks/store.py: the store beside its peers, a raw socket and memcpy, in one run.

put, get and exists at 4 KiB to 16 MiB, single and in batches of 32, one and four client processes, over TCP
and shared memory. Every get is checked against the bytes that were put. Compare ratios of one run: absolute
times change with the machine and its load.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from tqdm import tqdm

from storebench.plan import FULL, QUICK
from storebench.report import as_json, print_tables
from storebench.runner import Runner
from storebench.systems import BASELINES, OURS, PEERS
from storebench.targets import judge

_WIDTH_IN_A_PIPE = 160


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    # A plain exit runs the clean-up that ends every process started here.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    load_before = os.getloadavg()[0]
    systems = [make() for make in (*OURS, *BASELINES, *(make for peer in args.vs for make in PEERS[peer]))]
    if args.only:
        systems = [system for system in systems if system.name in args.only]
    budget = QUICK if args.quick else FULL
    if args.rounds:
        budget = budget._replace(rounds=args.rounds)
    # In a pipe rich takes 80 columns, too few for the table to be read.
    console = Console() if sys.stdout.isatty() else Console(width=_WIDTH_IN_A_PIPE)
    work_dir = Path(tempfile.mkdtemp(prefix="storebench-"))
    try:
        with tqdm(unit="turn", dynamic_ncols=True, file=sys.stderr) as bar:

            def advance(name: str) -> None:
                bar.set_postfix_str(name, refresh=False)
                bar.update()

            runner = Runner(budget, work_dir, advance=advance, report=lambda text: bar.write(text))
            bar.reset(runner.num_steps(systems))
            figures = runner.run(systems)
    finally:
        shutil.rmtree(work_dir, ignore_errors=True)
    verdicts = list(judge(figures))
    print_tables(console, figures, verdicts)
    for system in systems:
        console.print(f"{system.name}: {system.about}", style="dim", highlight=False)
    for name, reason in runner.failed.items():
        console.print(f"[red]{name} was left out:[/] {reason}", highlight=False)
    if args.json:
        document = as_json(figures, verdicts, systems, runner.failed, budget, load_before)
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    if args.plot:
        from storebench.plot import save_plot

        args.plot.parent.mkdir(parents=True, exist_ok=True)
        save_plot(figures, args.plot)
    wrong = [figure for figure in figures if figure.wrong_bytes]
    return 1 if wrong or any(name.startswith("ours") for name in runner.failed) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks/store.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--vs",
        type=_peers,
        default=["mooncake", "redis"],
        metavar="PEER,...",
        help=f"peers to measure beside ours, of {', '.join(PEERS)}, or none (default: mooncake,redis). "
        "Missing ones are installed into the cache; what cannot be is named and left out",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them there (.png, .svg, .pdf)")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds: about two minutes")
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds instead of the default number")
    parser.add_argument(
        "--only",
        type=lambda text: text.split(","),
        metavar="SYSTEM,...",
        help="measure just these systems, by the names the table shows",
    )
    return parser


def _peers(text: str) -> list[str]:
    if text == "none":
        return []
    names = text.split(",")
    for name in names:
        if name not in PEERS:
            raise argparse.ArgumentTypeError(f"unknown peer {name!r}; known are {', '.join(PEERS)}, none")
    return names
