"""TTFT by routing policy: real vLLM engines on CPU, questions about a few long documents.

    scripts/bench router_policies [--layout mixed|pd] [--quick] [--rounds N] [--json FILE]

Each engine computes on one thread, and its own cache has room for some of the documents only. A document is
asked about the more often the lower its number (Zipf), in no order, at random times (Poisson).

--layout mixed compares policies as the paper's figure does, each over two engines that prefill and decode:

  own caches    vLLM as it is: a prefix is where it was computed. random, least_loaded, cache_aware
  and a store   with our connector and one mooncake-store, seen as one on another host: what one engine has
                computed, the other can fetch, and so can the one that has forgotten it. global_cache_aware

The paper's engines fetch only where global_cache_aware says so; ours ask the store whoever routes, so `--all`
adds the other policies with a store: what that gives by itself.

--layout pd compares one prefill and one decode engine (--pd-protocol suite) with the same two engines mixed,
at the same load: answers are longer, and the times between tokens are looked at too.

Within a round everybody gets the same questions in the same order at the same times, one after the other, and
who begins changes with the round. So what is compared is the difference within a round; its interval is a
bootstrap over rounds. Engines forget their prefixes before each turn, whose documents begin with words of its
own; engines and routers run throughout (idle ones do not compute), and routers predict by what
`mooncake-router profile` measured. Compare within one run: times are those of a small model on this machine.
"""

import argparse
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
from demo_lib.cli import make_model
from demo_lib.processes import DemoError, Processes
from demo_lib.workload import DATA_DIR
from msgspec.structs import replace
from policiesbench.cells import LAYOUTS, LAYOUTS_PLAN, PAPER, STORE_FOR_ALL, Cell, order
from policiesbench.cluster import Cluster, Model
from policiesbench.figures import Turn, mean_ttft_ms
from policiesbench.runner import Runner, profile
from policiesbench.tables import Turns, by_cell, layouts_table, policies_table
from policiesbench.workload import Plan
from rich.console import Console
from tqdm import tqdm

_WIDTH_IN_A_PIPE = 140
_BYTES_PER_TOKEN = {"smollm2": 4.0, "tiny": 1.0}


def main(argv: list[str] | None = None) -> int:
    """1 when something does not start or a request fails. The order of the policies is told, not judged."""
    args = _parser().parse_args(argv)
    # A plain exit runs the clean-up that ends every process started here.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    name = "tiny" if args.quick else "smollm2"
    plan, rounds = _plan(args), args.rounds or (1 if args.quick else 6 if args.layout == "pd" else 8)
    cells = LAYOUTS if args.layout == "pd" else (*PAPER, *STORE_FOR_ALL) if args.all else PAPER
    try:
        model = Model(make_model(name, args.cache), _BYTES_PER_TOKEN[name])
        turns, rate_per_s = _run(plan, cells, rounds, model)
    except DemoError as error:
        print(f"router_policies: {error}", file=sys.stderr)
        return 1
    found = by_cell(sorted(turns, key=lambda turn: cells.index(Cell(turn.engines, turn.routed))))
    console = Console() if sys.stdout.isatty() else Console(width=_WIDTH_IN_A_PIPE)
    if args.layout == "pd":
        console.print(layouts_table(found, rate_per_s, plan.seed))
    else:
        console.print(policies_table(found, rate_per_s, plan.seed))
        console.print(_paper_order(found))
    if args.json:
        document = {"plan": msgspec.to_builtins(plan), "model": name, "requests_per_s": rate_per_s}
        document["turns"] = msgspec.to_builtins(turns)
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_bytes(msgspec.json.encode(document) + b"\n")
    return 0


def _plan(args: argparse.Namespace) -> Plan:
    plan = LAYOUTS_PLAN if args.layout == "pd" else Plan()
    if args.quick:
        plan = replace(plan, requests=9, documents=3, document_bytes=1000)
    given: dict[str, Any] = {name: getattr(args, name) for name in ("requests", "documents", "load", "seed")}
    return replace(plan, **{name: value for name, value in given.items() if value is not None})


def _run(plan: Plan, cells: tuple[Cell, ...], rounds: int, model: Model) -> tuple[list[Turn], float]:
    texts = [(DATA_DIR / f"{name}.txt").read_text() for name in ("declaration", "genesis")]
    with tempfile.TemporaryDirectory(prefix="pol.") as name, Processes(Path(name)) as processes:
        cluster = Cluster(processes, model, plan, cells, Path(name))
        print("router_policies: starting a store and the engines", file=sys.stderr)
        cluster.start_engines()
        config = Path(name) / "router.toml"
        prefill = profile(cluster, model, plan, config)
        rate_per_s = plan.load * 2 * 1e3 / prefill.compute_ms(model.document_tokens(plan), 0)
        cluster.start_routers(config)
        turns = []
        total = plan.requests * len(cells) * rounds
        with tqdm(total=total, unit=" requests", dynamic_ncols=True, file=sys.stderr) as bar:
            runner = Runner(cluster, plan, texts, bar.update)
            runner.warm_up()
            for number in range(rounds):
                for cell in order(cells, number):
                    where = f"round {number + 1}, {cell.engines}, {cell.routed}"
                    bar.set_description(where)
                    try:
                        turn = runner.turn(cell, number, rate_per_s)
                    except DemoError:
                        processes.check_alive()  # the better reason, with the end of its log
                        raise
                    turns.append(turn)
                    bar.write(f"{where}: mean TTFT {mean_ttft_ms(turn):.0f} ms", file=sys.stderr)
        return turns, rate_per_s


def _paper_order(turns: Turns) -> str:
    means = {cell: sum(map(mean_ttft_ms, turns[cell])) / len(turns[cell]) for cell in reversed(PAPER)}
    told = " < " if list(means.values()) == sorted(means.values()) else ", "
    return "Mean TTFT: " + told.join(f"{cell.routed} {means[cell]:.0f} ms" for cell in means)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/bench router_policies",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--layout", choices=("mixed", "pd"), default="mixed", help="default: mixed")
    parser.add_argument("--all", action="store_true", help="with mixed: every policy with a store as well")
    parser.add_argument(
        "--quick", action="store_true", help="the tiny model, nine short requests: does it work?"
    )
    parser.add_argument("--rounds", type=int, help="default: 8, with pd 6, with --quick 1")
    parser.add_argument("--requests", type=int, help="of a turn (default: 54, with pd 40)")
    parser.add_argument("--documents", type=int, help="default: 9, with pd 8")
    parser.add_argument(
        "--load",
        type=float,
        help="arrivals, times what both engines could do without a cache (default: 1, with pd 0.5)",
    )
    parser.add_argument("--seed", type=int, help="of everything that is drawn (default: 0)")
    parser.add_argument("--cache", type=Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
