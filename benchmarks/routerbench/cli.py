"""benchmarks/router.py: what the router costs, beside vllm-router and sglang-router in the same run.

CPU time a request and a streamed chunk, latency added, the first token of streams, calls to engines for
each request. Stand-in engines (router_engine.py; as many again that turn prompts into token ids, for the
router that asks for that) and the load generator share the machine with the routers; what engines take is not
counted. Two relays that only move bytes say what no router can do without, here and now. CPU time is the
kernel's own account of a router's processes, so it is right on a busy machine too; requests a second and
latencies are what is left of the machine. Compare ratios of one run.
"""

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path

from rich.console import Console
from storebench.processes import Process, accepts, free_port

from routerbench.cases import CASES
from routerbench.report import as_json, print_tables, save_plot
from routerbench.runner import Engines, Runner, engine_command
from routerbench.systems import FLOORS, OURS, PEERS
from routerbench.targets import judge

_WIDTH_IN_A_PIPE = 140
_FEWEST_ENGINES = 2  # one to prefill, one to decode


def main(argv: list[str] | None = None) -> int:
    """Exit status 1 when one of ours could not be measured or answered anything but 200."""
    args = _parser().parse_args(argv)
    # A plain exit runs the clean-up that ends every process started here.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    load_before = os.getloadavg()[0]
    systems = [*OURS, *FLOORS, *(system for peer in args.vs for system in PEERS[peer])]
    console = Console() if sys.stdout.isatty() else Console(width=_WIDTH_IN_A_PIPE)
    with tempfile.TemporaryDirectory(prefix="routerbench.") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        engines = Engines(
            [_started_engine(folder, stack) for _ in range(args.engines)],
            [_started_engine(folder, stack, "--scale-out") for _ in range(args.engines)],
        )
        runner = Runner(engines, folder, lambda text: print(text, file=sys.stderr, flush=True))
        figures = runner.run(systems, args.cases, rounds=args.rounds, seconds=args.seconds)
    verdicts = list(judge(figures))
    print_tables(console, figures, verdicts)
    for system in systems:
        console.print(f"{system.name}: {system.about}", style="dim", highlight=False)
    for name, reason in runner.failed.items():
        console.print(f"[red]{name} was left out:[/] {reason}", highlight=False)
    if args.json:
        document = as_json(figures, verdicts, systems, runner.failed, load_before, args.engines)
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    if args.plot:
        args.plot.parent.mkdir(parents=True, exist_ok=True)
        save_plot(figures, args.plot)
    wrong = any(figure.errors for figure in figures if figure.system.startswith("ours"))
    return 1 if wrong or any(name.startswith("ours") for name in runner.failed) else 0


def _started_engine(folder: Path, stack: contextlib.ExitStack, *flags: str) -> int:
    """The port of a stand-in engine that runs until `stack` is closed."""
    port = free_port()
    engine = Process(engine_command(sys.executable, port, *flags), folder / f"engine-{port}.log")
    stack.callback(engine.stop)
    engine.wait_until(lambda: accepts(port), 60.0, "a stand-in engine")
    return port


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks/router.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--vs",
        type=lambda text: _names(text, PEERS) if text != "none" else [],
        default=list(PEERS),
        metavar="PEER,...",
        help=f"peers to measure beside ours, of {', '.join(PEERS)}, or none (default: all). Missing ones are "
        "installed into the cache; what cannot be is named and left out",
    )
    cases = "; ".join(f"{name}: {case.about}" for name, case in CASES.items())
    parser.add_argument(
        "--cases",
        type=lambda text: _names(text, CASES),
        default=list(CASES),
        metavar="CASE,...",
        help=f"(default: all) {cases}",
    )
    parser.add_argument(
        "--engines", type=_num_engines, default=_FEWEST_ENGINES, metavar="N", help="behind each (default: 2)"
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="default: 3")
    parser.add_argument("--seconds", type=float, default=2.5, help="of each measurement (default: 2.5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them there (.png, .svg, .pdf)")
    return parser


def _num_engines(text: str) -> int:
    if not text.isdecimal() or int(text) < _FEWEST_ENGINES:
        raise argparse.ArgumentTypeError(f"at least {_FEWEST_ENGINES}: one to prefill, one to decode")
    return int(text)


def _names(text: str, known: Collection[str]) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"unknown: {name!r}; known are {', '.join(known)}")
    return names
