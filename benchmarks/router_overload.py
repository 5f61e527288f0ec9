"""What admission does when twice as many requests come as a cluster can serve.

    scripts/bench router_overload [--quick] [--rounds N] [--profile FILE] [--json FILE]

Stand-in engines (two prefill, one decode) behind mooncake-router take as long for a prompt and for a decode
step as the engine whose profile they are given, queue as it would, and use no computing time for it. Each
admission policy is offered the same requests, which come by themselves (Poisson) and do not wait for each
other:

  baseline     TTFT is looked at when a request comes, the decode load when its prefill is done
  early        both when it comes
  predictive   the decode load as it will be when its prefill is done, if all decode equally long
  predictive_request   the same, with the output length that was seen before as what each may have

`refused` counts requests by the router's reason. `prefilled in vain` are those whose prompt was computed by
a prefill engine and which no decode engine ever saw; the engines count them, not the router. `SLO met` is
the share of the answered ones that kept both SLOs as their clients measured them, `goodput` the requests a
second that did.

The lengths are such that prefill and decode are about equally busy: then a prefill in vain takes the
place of somebody who could have been served. Capacity is what the slower of the two sides can do within its
SLO, from the models. The default models are the router's own (8B on one GPU); `mooncake-router profile`
measures others.
"""

import argparse
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import asdict, replace
from overloadbench.plan import ADMISSIONS, Models, Plan, requests
from overloadbench.runner import Figures, added, run_turn
from rich.console import Console
from rich.table import Table
from storebench.processes import SystemFailed
from tqdm import tqdm

from kvcore.config import read_file
from kvcore.errors import ConfigError
from router.core.settings import Settings

_WIDTH_IN_A_PIPE = 120


def main(argv: list[str] | None = None) -> int:
    """1 when requests failed, or when early or predictive prefilled in vain; 2 for what cannot be run."""
    args = _parser().parse_args(argv)
    # A plain exit runs the clean-up that ends every process started here.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        plan = _plan(args)
        turns = _run(plan, args.rounds)
    except (ConfigError, SystemFailed) as error:
        print(f"router_overload: {error}", file=sys.stderr)
        return 2
    totals = [added([turn for turn in turns if turn.admission == name]) for name in ADMISSIONS]
    console = Console() if sys.stdout.isatty() else Console(width=_WIDTH_IN_A_PIPE)
    console.print(_table(plan, totals))
    if args.json:
        document = {
            "plan": msgspec.to_builtins(plan),
            "capacity_per_s": {"prefill": plan.prefill_per_s, "decode": plan.decode_per_s},
            "totals": [asdict(one) for one in totals],
            "turns": [asdict(one) for one in turns],
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")
    complaints = [f"{one.admission}: {text}" for one in totals for text in one.failures]
    complaints += [
        f"{one.admission}: {one.prefilled_in_vain} requests were prefilled in vain"
        for one in totals
        if one.admission != "baseline" and one.prefilled_in_vain
    ]
    for complaint in complaints:
        print(f"router_overload: {complaint}", file=sys.stderr)
    return 1 if complaints else 0


def _plan(args: argparse.Namespace) -> Plan:
    plan = Plan(
        load=args.load,
        seconds=args.seconds,
        warm_up_s=args.seconds / 4,
        ttft_slo_ms=args.ttft_slo_ms,
        tbt_slo_ms=args.tbt_slo_ms,
        seed=args.seed,
    )
    if args.quick:
        plan = replace(plan, seconds=min(args.seconds, 15.0), warm_up_s=5.0)
    if args.profile:
        tables = read_file(args.profile).get("scheduling", {})
        try:
            settings = msgspec.convert(tables, Settings)
        except msgspec.ValidationError as error:
            raise ConfigError(
                f"{args.profile}: {error}; write what `mooncake-router profile` prints"
            ) from error
        models = Models(settings.prefill_model, settings.decode_model)
        plan = replace(plan, models=models)
    if plan.capacity_per_s <= 0:
        raise ConfigError(
            f"not one request decodes within {plan.tbt_slo_ms} ms a token on this engine: raise --tbt-slo-ms"
        )
    return plan


def _run(plan: Plan, rounds: int) -> list[Figures]:
    turns = []
    total = sum(len(list(requests(plan, number))) for number in range(rounds)) * len(ADMISSIONS)
    with (
        tempfile.TemporaryDirectory(prefix="overload.") as name,
        tqdm(total=total, unit=" requests", dynamic_ncols=True, file=sys.stderr) as bar,
    ):
        for number in range(rounds):
            turn_of = number % len(ADMISSIONS)
            for admission in (*ADMISSIONS[turn_of:], *ADMISSIONS[:turn_of]):
                bar.set_description(f"round {number + 1}, {admission}")
                folder = Path(name) / f"{number}-{admission}"
                turns.append(run_turn(plan, admission, number, folder, lambda: bar.update() and None))
    return turns


def _table(plan: Plan, totals: list[Figures]) -> Table:
    rate = plan.load * plan.capacity_per_s
    title = (
        f"{plan.load:g} x capacity: {rate:.1f} requests/s to {plan.num_prefill} prefill "
        f"({plan.prefill_per_s:.1f}/s) and {plan.num_decode} decode engines ({plan.decode_per_s:.1f}/s)"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for one in totals:
        table.add_column(one.admission, justify="right")

    def row(name: str, *cells: Any) -> None:
        table.add_row(name, *(f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in cells))

    row("offered", *(one.offered for one in totals))
    row("refused", *(one.num_refused for one in totals))
    for reason in sorted({reason for one in totals for reason in one.refused}):
        row(f"  {reason}", *(one.refused.get(reason, 0) for one in totals))
    row("prefilled in vain", *(one.prefilled_in_vain for one in totals))
    row("answered", *(one.answered for one in totals))
    row("SLO met, % of answered", *(100 * one.met_slo / max(one.answered, 1) for one in totals))
    counted_s = plan.seconds - plan.warm_up_s
    row("goodput, requests/s", *(one.met_slo / (one.round * counted_s) for one in totals))
    row("TTFT p50, ms", *(one.ttft_p50_ms for one in totals))
    row(f"TTFT p90, ms (SLO {plan.ttft_slo_ms:g})", *(one.ttft_p90_ms for one in totals))
    row("TBT p50, ms", *(one.tbt_p50_ms for one in totals))
    row(f"TBT p90, ms (SLO {plan.tbt_slo_ms:g})", *(one.tbt_p90_ms for one in totals))
    return table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/bench router_overload",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    defaults = Plan()
    parser.add_argument("--quick", action="store_true", help="turns of 15 seconds: does it work?")
    parser.add_argument("--rounds", type=int, default=1, help="of one turn for each policy (default: 1)")
    parser.add_argument("--seconds", type=float, default=defaults.seconds, help="of a turn (default: 45)")
    parser.add_argument("--load", type=float, default=defaults.load, help="times capacity (default: 2)")
    parser.add_argument("--ttft-slo-ms", type=float, default=defaults.ttft_slo_ms, help="(default: 2200)")
    parser.add_argument("--tbt-slo-ms", type=float, default=defaults.tbt_slo_ms, help="(default: 27.5)")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals and lengths")
    parser.add_argument(
        "--profile",
        type=Path,
        metavar="FILE",
        help="a .toml with what `mooncake-router profile` measured; SLOs must fit it",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
