"""Mixed traffic through two routers while their engines are killed, restarted and stopped.

    scripts/bench router_soak [--minutes 30] [--rate 12] [--compiled] [--json FILE]

One router in front of three mixed engines (Algorithm 1, admission), one in front of two prefill and two
decode engines, an open dashboard on each. Ends with status 1 when a request hung, when a counter of requests
or legs did not return to 0, or when memory grew.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from routersoak.soak import Outcome, Plan, soak
from storebench.processes import SystemFailed

_MIB = 1 << 20


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--rate", type=float, default=12.0, help="requests a second to each router")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compiled", action="store_true", help="the routers' hot path is compiled")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    args = parser.parse_args()
    plan = Plan(seconds=args.minutes * 60, requests_per_s=args.rate, seed=args.seed, compiled=args.compiled)
    try:
        with tempfile.TemporaryDirectory(prefix="soak.") as folder:
            outcomes = asyncio.run(soak(Path(folder), plan, _show_progress))
    except SystemFailed as error:
        print(f"router_soak: {error}", file=sys.stderr)
        return 1
    print(file=sys.stderr)
    Console().print(_table(outcomes))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(msgspec.to_builtins(outcomes), indent=2) + "\n")
    complaints = [f"{one.router}: {text}" for one in outcomes for text in one.complaints()]
    for complaint in complaints:
        print(f"router_soak: {complaint}", file=sys.stderr)
    return 1 if complaints else 0


def _show_progress(text: str) -> None:
    print(f"\r{text}", end="" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)


def _table(outcomes: list[Outcome]) -> Table:
    table = Table(title=f"{outcomes[0].seconds / 60:.1f} minutes", title_justify="left")
    table.add_column("")
    for one in outcomes:
        table.add_column(one.router, justify="right")

    def row(name: str, *values: object) -> None:
        table.add_row(name, *(str(value) for value in values))

    row("requests", *(one.requests for one in outcomes))
    for ending in dict.fromkeys(ending for one in outcomes for ending in one.endings):
        row(f"  {ending}", *(one.endings.get(ending, 0) for one in outcomes))
    row("hung", *(one.num_hung for one in outcomes))
    row("left at the end: requests", *(one.at_the_end.active_requests for one in outcomes))
    row("left at the end: legs", *(one.at_the_end.in_flight for one in outcomes))
    for at, part in enumerate(("first", "middle", "last")):
        row(f"memory, MiB, {part} third", *(f"{one.rss_bytes[at] / _MIB:.1f}" for one in outcomes))
    row(
        "open files, first and last third", *(f"{one.open_files[0]}, {one.open_files[2]}" for one in outcomes)
    )
    row("CPU, share of a core", *(f"{one.cpu_share:.1%}" for one in outcomes))
    for trouble in outcomes[0].engine_troubles:
        row(f"engines {trouble}", *(one.engine_troubles.get(trouble, 0) for one in outcomes))
    return table


if __name__ == "__main__":
    sys.exit(main())
