"""`mooncake-sim`: what a cluster would do with a trace."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from kvcore import __version__
from kvcore.errors import ConfigError, KVError
from kvsim.config import SimConfig
from kvsim.hit_rate import HitRate, hit_rate, hit_rates
from kvsim.paper import FIGURES, Figure, Traces
from kvsim.planning import smallest_cluster
from kvsim.recorded import written
from kvsim.report import COLUMNS, make_directory, row, write_figure, write_hit_rates, write_report
from kvsim.runs import Result, load_trace, read_any, simulate, simulate_many
from kvsim.settings_paths import comparison, configure, parse_assignment, variants

_DESCRIPTION = r"""Replays a trace of requests through the router's own core on a simulated cluster.

  mooncake-sim run configs/sim/mooncake.toml --trace TRACE.jsonl          one cluster
  mooncake-sim compare configs/sim/baselines.toml --trace TRACE.jsonl     several, side by side
  mooncake-sim sweep configs/sim/mooncake.toml --trace TRACE.jsonl --vary trace.speed=1,2,3
  mooncake-sim plan configs/sim/mooncake.toml --trace TRACE.jsonl         the smallest that keeps the SLO
  mooncake-sim sweep configs/sim/mooncake.toml --trace TRACE.jsonl \
      --vary cluster.prefill_nodes:cluster.decode_nodes=4:12,8:8,12:4     two settings together
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
        name: str, run: Callable[[argparse.Namespace], None], text: str, config: str | None, runs: bool = True
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
        written_files = "report.html, results.json and PNGs" if config else "PNGs and JSON"
        sub.add_argument("--out", type=Path, metavar="DIR", help=f"write {written_files} there")
        sub.add_argument("--json", action="store_true", help="results as JSON on standard output")
        if runs:
            sub.add_argument(
                "--processes", type=positive, default=0, metavar="N", help="at once (default: one a CPU)"
            )
        sub.set_defaults(run=run)
        return sub

    one = "a TOML, JSON or YAML file (see configs/sim)"
    single = command("run", _run, "simulate one cluster", one, runs=False)
    single.add_argument(
        "--record", type=Path, metavar="FILE", help="write every decision; as FILE.record it is a trace"
    )
    command("compare", _compare, "simulate the clusters of a comparison", "a file with [base] and [[runs]]")
    sweep = command("sweep", _sweep, "simulate every combination of some settings", one)
    sweep.add_argument(
        "--vary",
        action="append",
        required=True,
        metavar="NAME=V1,V2",
        help="an axis of the sweep, or NAME:NAME=V1:V1,V2:V2 for settings that change together; may be "
        "repeated",
    )
    plan = command("plan", _plan, "find the smallest cluster that keeps the SLO", one)
    plan.add_argument(
        "--good-share",
        type=share,
        default=0.95,
        metavar="SHARE",
        help="of all requests that have to keep both SLOs (default: %(default)s)",
    )
    plan.add_argument(
        "--max-nodes",
        type=positive,
        default=32,
        metavar="N",
        help="largest size tried (default: %(default)s)",
    )
    rates = command("hit-rate", _hit_rate, "replay a trace through caches alone", None, runs=False)
    rates.add_argument("trace", metavar="TRACE", help="a trace with hash_ids, or a *.record")
    rates.add_argument(
        "--capacities",
        type=positive_list,
        default=[1_000, 10_000, 30_000, 50_000],
        metavar="N,N",
        help="in blocks (default: 1000,10000,30000,50000)",
    )
    rates.add_argument(
        "--policies", default="lru", metavar="P,P", help="eviction policies (default: %(default)s)"
    )
    rates.add_argument(
        "--warmup-share",
        type=share,
        default=0.0,
        metavar="SHARE",
        help="of the requests, which only fill the cache and are not counted (default: 0)",
    )
    paper = command("paper", _paper, "draw figures of the Mooncake papers again", None)
    paper.add_argument(
        "figure", choices=["all", *FIGURES], metavar="FIGURE", help=f"all, {', '.join(FIGURES)}"
    )
    paper.add_argument("--conversation", required=True, metavar="FILE", help="conversation_trace.jsonl")
    paper.add_argument("--synthetic", required=True, metavar="FILE", help="synthetic_trace.jsonl")
    paper.add_argument(
        "--end-s",
        type=positive,
        default=0.0,
        metavar="S",
        help="only so many seconds of each trace, for a quick look (shapes may then be missed)",
    )
    return parser


def positive(text: str) -> int:
    number = int(text) if text.isascii() and text.isdigit() else 0
    if not number:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive whole number")
    return number


def positive_list(text: str) -> list[int]:
    return [positive(part.strip()) for part in text.split(",")]


def share(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share: write a number from 0 to 1, as 0.95")
    return number


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
    trace = load_trace(config)
    with (
        contextlib.nullcontext() if options.record is None else written(options.record) as record,
        tqdm(total=len(trace.requests), unit="request", disable=not sys.stderr.isatty()) as bar,
    ):
        result = simulate(config, bar.update, record)
    _tell(options, config.label, [result])


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
        lambda configs: _many(configs, options.processes, f"{configs[0].cluster.num_nodes} nodes"),
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
    trace = read_any(options.trace)
    if not trace.num_blocks:
        raise ConfigError(f"trace {options.trace}: has no hash_ids, so that nothing can be hit")
    policies = [name.strip() for name in options.policies.split(",")]
    warmup = int(options.warmup_share * len(trace.requests))
    pairs = [(name, size) for name in policies for size in options.capacities]
    with tqdm(total=len(pairs), unit="cache", disable=not sys.stderr.isatty()) as bar:
        rates = []
        for name, size in pairs:
            rates.append(hit_rate(trace, name, size, warmup))
            bar.update()
    if options.out is not None:
        write_hit_rates(options.out, trace.name, rates, trace.block_size_tokens)
    if options.json:
        print(msgspec.json.encode(rates).decode())
        return
    title = f"{trace.name}: one cache for all, blocks of {trace.block_size_tokens} tokens"
    table = Table("policy", "capacity, blocks", "hit rate, blocks", "hit rate, tokens", title=title)
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
    for number, name in enumerate(names, start=1):
        label = f"{name} ({number} of {len(names)})"
        figure = FIGURES[name](traces, lambda configs, at=label: _many(configs, options.processes, at))  # type: ignore[misc]
        missed += sum(not claim.holds for claim in figure.claims)
        if options.json:
            print(msgspec.json.encode(msgspec.structs.replace(figure, plots={})).decode())
        else:
            _print_figure(figure)
        if options.out is not None:
            write_figure(options.out, figure)
    if missed:
        are = "shape of the papers" if missed == 1 else "shapes of the papers"
        raise ConfigError(f"{missed} {are} did not come out (see MISSED above)")


def _print_figure(figure: Figure) -> None:
    table = Table("", "paper", "ours", title=figure.title, title_justify="left")
    for line in figure.rows:
        table.add_row(line.what, line.paper, line.ours)
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    for claim in figure.claims:
        print(f"  {'holds ' if claim.holds else 'MISSED'}  {claim.text}")
    console.print(figure.words + "\n")


def _many(configs: Sequence[SimConfig], processes: int, label: str = "") -> list[Result]:
    with tqdm(
        total=len(configs), unit="run", desc=label or None, leave=False, disable=not sys.stderr.isatty()
    ) as bar:
        return simulate_many(configs, processes, lambda config: bar.update(1))


def _tell(options: argparse.Namespace, title: str, results: Sequence[Result]) -> None:
    if options.json:
        print(msgspec.json.encode([result.summary for result in results]).decode())
    else:
        table = Table(title=title)
        for number, column in enumerate(COLUMNS):
            table.add_column(column, justify="right" if number else "left")
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
        if options.out is not None:
            make_directory(options.out)  # before the work, whose results could not be written
        options.run(options)
    except KVError as error:
        print(f"mooncake-sim: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("mooncake-sim: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
