"""`mooncake-sim`: what a cluster would do with a trace."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from kvcore import __version__
from kvcore.errors import ConfigError, KVError
from kvsim.cluster import Cluster
from kvsim.config import SimConfig
from kvsim.hit_rate import HitRate, hit_rate, hit_rates
from kvsim.paper import FIGURES, Figure, Traces
from kvsim.planning import smallest_cluster
from kvsim.recorded import write_lines
from kvsim.report import COLUMNS, row, write_figure, write_report
from kvsim.runs import Result, load_trace, simulate, simulate_many
from kvsim.settings_paths import comparison, configure, parse_assignment, variants
from kvsim.trace import read_trace
from router.core.record import Line

_DESCRIPTION = """\
Replays a trace of requests through the router's own core on a simulated cluster.

  mooncake-sim run configs/sim/mooncake.toml --trace TRACE.jsonl          one cluster
  mooncake-sim compare configs/sim/baselines.toml --trace TRACE.jsonl     several, side by side
  mooncake-sim sweep configs/sim/mooncake.toml --trace TRACE.jsonl --vary trace.speed=1,2,3
  mooncake-sim plan configs/sim/mooncake.toml --trace TRACE.jsonl         the smallest that keeps the SLO
  mooncake-sim hit-rate TRACE.jsonl                                       caches alone, by capacity
  mooncake-sim paper all --conversation C.jsonl --synthetic S.jsonl       the paper's figures, ours beside
"""
REPORT_CAPACITIES_BLOCKS = (1_000, 3_000, 10_000, 30_000, 100_000)


def make_parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("mooncake-sim", description=_DESCRIPTION, formatter_class=raw)
    parser.add_argument("--version", action="version", version=f"mooncake-sim {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(
        name: str, run: Callable[[argparse.Namespace], None], text: str, config: str | None
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if config is not None:
            sub.add_argument("config", metavar="CONFIG", help=config)
            sub.add_argument("--trace", metavar="FILE", help="instead of the configuration's")
            sub.add_argument(
                "--set",
                action="append",
                default=[],
                metavar="NAME=VALUE",
                help="any setting by its dotted name, as cluster.prefill_nodes=8; may be repeated",
            )
        sub.add_argument("--out", type=Path, metavar="DIR", help="write report.html, results.json and PNGs")
        sub.add_argument("--json", action="store_true", help="summaries as JSON on standard output")
        sub.add_argument("--processes", type=int, default=0, metavar="N", help="(default: one a CPU)")
        sub.set_defaults(run=run)
        return sub

    one = "a TOML, JSON or YAML file (see configs/sim)"
    single = command("run", _run, "simulate one cluster", one)
    single.add_argument("--record", type=Path, metavar="FILE", help="write every decision, *.record")
    command("compare", _compare, "simulate the clusters of a comparison", "a file with [base] and [[runs]]")
    sweep = command("sweep", _sweep, "simulate every combination of some settings", one)
    sweep.add_argument(
        "--vary",
        action="append",
        required=True,
        metavar="NAME=V1,V2",
        help="an axis of the sweep; may be repeated",
    )
    plan = command("plan", _plan, "find the smallest cluster that keeps the SLO", one)
    plan.add_argument("--good-share", type=float, default=0.95, help="of all requests (default: %(default)s)")
    plan.add_argument("--max-nodes", type=int, default=32, help="(default: %(default)s)")
    rates = command("hit-rate", _hit_rate, "replay a trace through caches alone", None)
    rates.add_argument("trace", type=Path, metavar="TRACE")
    rates.add_argument("--capacities", default="1000,10000,30000,50000", help="blocks (default: %(default)s)")
    rates.add_argument("--policies", default="lru", help="eviction policies (default: %(default)s)")
    rates.add_argument("--warmup-share", type=float, default=0.0, help="requests that only fill the cache")
    paper = command("paper", _paper, "draw figures of the Mooncake papers again", None)
    paper.add_argument(
        "figure", choices=["all", *FIGURES], metavar="FIGURE", help=f"all, {', '.join(FIGURES)}"
    )
    paper.add_argument("--conversation", required=True, metavar="FILE", help="conversation_trace.jsonl")
    paper.add_argument("--synthetic", required=True, metavar="FILE", help="synthetic_trace.jsonl")
    paper.add_argument(
        "--end-s", type=float, default=0.0, help="only so much of each trace, for a quick look"
    )
    return parser


def _overrides(options: argparse.Namespace) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in options.set:
        name, values = parse_assignment(text)
        found[name] = ",".join(values)
    if options.trace:
        found["trace.path"] = options.trace
    return found


def _run(options: argparse.Namespace) -> None:
    config = configure(options.config, _overrides(options))
    lines: list[Line] = []
    trace = load_trace(config)
    with tqdm(total=len(trace.requests), unit="request", disable=not sys.stderr.isatty()) as bar:
        if options.record is None:
            results = [simulate(config, bar.update)]
        else:
            cluster = Cluster(config, trace, record=lines.append, progress=bar.update)
            cluster.run()
            write_lines(options.record, lines)
            results = [Result(config, cluster.summary(), cluster.outcomes, cluster.series, 0.0)]
    _tell(options, config.label, results)


def _compare(options: argparse.Namespace) -> None:
    configs = comparison(options.config, _overrides(options))
    _tell(options, Path(options.config).stem, _many(configs, options.processes))


def _sweep(options: argparse.Namespace) -> None:
    axes = [parse_assignment(text) for text in options.vary]
    configs = variants(options.config, _overrides(options), axes)
    _tell(options, ", ".join(name for name, _ in axes), _many(configs, options.processes))


def _plan(options: argparse.Namespace) -> None:
    config = configure(options.config, _overrides(options))
    plan = smallest_cluster(
        config,
        options.good_share,
        options.max_nodes,
        lambda configs: _many(configs, options.processes),
    )
    _tell(options, "plan", plan.tried)
    if plan.best is None:
        raise ConfigError(
            f"not even {options.max_nodes} nodes keep the SLO for {options.good_share:.0%} of the requests; "
            "allow more with --max-nodes or relax the SLO"
        )
    print(
        f"smallest: {plan.best.config.cluster.label}, {plan.best.summary.good_share:.1%} good",
        file=sys.stderr,
    )


def _hit_rate(options: argparse.Namespace) -> None:
    trace = read_trace(options.trace)
    policies = options.policies.split(",")
    capacities = [int(capacity) for capacity in options.capacities.split(",")]
    if options.warmup_share:
        warmup = int(options.warmup_share * len(trace.requests))
        rates = [hit_rate(trace, name, size, warmup) for name in policies for size in capacities]
    else:
        rates = hit_rates(trace, policies, capacities)
    if options.json:
        print(msgspec.json.encode(rates).decode())
        return
    table = Table("policy", "capacity, blocks", "hit rate, blocks", "hit rate, tokens")
    for rate in rates:
        table.add_row(*_rate_cells(rate))
    Console().print(table)


def _rate_cells(rate: HitRate) -> tuple[str, ...]:
    return (
        rate.eviction_policy,
        f"{rate.capacity_blocks:,}",
        f"{rate.of_blocks:.4f}",
        f"{rate.of_tokens:.4f}",
    )


def _paper(options: argparse.Namespace) -> None:
    traces = Traces(options.conversation, options.synthetic, options.end_s)
    names = list(FIGURES) if options.figure == "all" else [options.figure]
    missed = 0
    for name in names:
        figure = FIGURES[name](traces, lambda configs: _many(configs, options.processes))
        missed += sum(not claim.holds for claim in figure.claims)
        if options.json:
            print(msgspec.json.encode(msgspec.structs.replace(figure, plots={})).decode())
        else:
            _print_figure(figure)
        if options.out is not None:
            write_figure(options.out, figure)
    if missed:
        raise ConfigError(f"{missed} of the papers' shapes did not come out (see above)")


def _print_figure(figure: Figure) -> None:
    table = Table("", "paper", "ours", title=figure.title, title_justify="left")
    for line in figure.rows:
        table.add_row(line.what, line.paper, line.ours)
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    for claim in figure.claims:
        print(f"  {'holds ' if claim.holds else 'MISSED'}  {claim.text}")
    console.print(figure.words + "\n")


def _many(configs: Sequence[SimConfig], processes: int) -> list[Result]:
    with tqdm(total=len(configs), unit="run", disable=not sys.stderr.isatty()) as bar:
        return simulate_many(configs, processes, lambda config: bar.update(1))


def _tell(options: argparse.Namespace, title: str, results: Sequence[Result]) -> None:
    if options.json:
        print(msgspec.json.encode([result.summary for result in results]).decode())
    else:
        table = Table(*COLUMNS, title=title)
        for result in results:
            table.add_row(*row(result.summary))
        Console(width=None if sys.stdout.isatty() else 160).print(table)
    if options.out is not None:
        trace = load_trace(results[0].config)
        rates = hit_rates(trace, ["lru"], REPORT_CAPACITIES_BLOCKS) if trace.num_blocks else []
        print(write_report(options.out, title, results, rates), file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    options = make_parser().parse_args(arguments)
    try:
        options.run(options)
    except KVError as error:
        print(f"mooncake-sim: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
