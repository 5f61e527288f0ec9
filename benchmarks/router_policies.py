"""TTFT by routing policy: two real vLLM engines on CPU, a burst of questions about a few long documents.

    scripts/bench router_policies [--quick] [--rounds N] [--json FILE]

Which policy is better depends on what an engine can do about a prefix that another one has, so there are two
setups, each with two mixed engines of its own:

  own caches    vLLM as it is: a prefix is where it was computed. random, least_loaded, cache_aware
  and a store   with our connector and one mooncake-store, seen as one on another host: whatever one
                engine has computed the other can fetch. The same, and global_cache_aware

The paper's figure compares the first three of the first setup with the last of the second: its engines
fetch only where global_cache_aware says so. Ours ask the store whoever routes, so the other rows of the
second setup show what the store alone gives.

All engines run throughout (idle ones do not compute), are profiled once (`mooncake-router profile`, for what
the routers predict), and forget their prefixes before each turn; each turn's documents begin with words of
their own. Within a round every policy gets the same questions in the same order at the same times (Poisson).
Compare within one run: times are those of a small model on this machine.
"""

import argparse
import signal
import statistics
import sys
import tempfile
from pathlib import Path

import msgspec
from demo_lib.cli import make_model
from demo_lib.processes import DemoError, Processes
from demo_lib.workload import DATA_DIR
from policiesbench.cluster import POLICIES, Cluster
from policiesbench.runner import Runner, order, profile
from policiesbench.workload import Plan, Turn
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

_PAPER_ORDER = (
    ("and a store", "global_cache_aware"),
    ("own caches", "cache_aware"),
    ("own caches", "least_loaded"),
    ("own caches", "random"),
)
_WIDTH_IN_A_PIPE = 120
_BYTES_PER_TOKEN = {"smollm2": 4.0, "tiny": 1.0}


def main(argv: list[str] | None = None) -> int:
    """1 when something does not start or a request fails. The order of the policies is told, not judged."""
    args = _parser().parse_args(argv)
    # A plain exit runs the clean-up that ends every process started here.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    model_name = "tiny" if args.quick else "smollm2"
    plan = Plan(documents=args.documents, questions=args.questions, load=args.load, seed=args.seed)
    if args.quick:
        plan = Plan(documents=3, questions=3, document_bytes=2000, load=args.load, seed=args.seed)
    rounds = 1 if args.quick else args.rounds
    try:
        model = make_model(model_name, args.cache)
        turns, rate = _run(plan, rounds, model, _BYTES_PER_TOKEN[model_name])
    except DemoError as error:
        print(f"router_policies: {error}", file=sys.stderr)
        return 1
    console = Console() if sys.stdout.isatty() else Console(width=_WIDTH_IN_A_PIPE)
    console.print(_table(turns, rate))
    means = {cell: _mean(turns, *cell, "mean_ttft_ms") for cell in _PAPER_ORDER}
    told = " < " if list(means.values()) == sorted(means.values()) else ", "
    console.print("Mean TTFT: " + told.join(f"{policy} {means[s, policy]:.0f} ms" for s, policy in means))
    if args.json:
        document = {"plan": msgspec.to_builtins(plan), "model": model_name, "requests_per_s": rate}
        document["turns"] = msgspec.to_builtins(turns)
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")
    return 0


def _run(plan: Plan, rounds: int, model: Path, bytes_per_token: float) -> tuple[list[Turn], float]:
    texts = [(DATA_DIR / f"{name}.txt").read_text() for name in ("declaration", "genesis")]
    with tempfile.TemporaryDirectory(prefix="pol.") as name, Processes(Path(name)) as processes:
        cluster = Cluster(processes, model, Path(name))
        print("router_policies: starting a store and four engines", file=sys.stderr)
        cluster.start()
        config = Path(name) / "router.toml"
        prefill = profile(cluster, model, config)
        tokens = round(plan.document_bytes / bytes_per_token)
        rate = plan.load * 2 * 1e3 / prefill.compute_ms(tokens, 0)
        cells = sum(map(len, POLICIES.values()))
        total = plan.documents * plan.questions * cells * rounds
        turns = []
        with tqdm(total=total, unit=" requests", dynamic_ncols=True, file=sys.stderr) as bar:
            runner = Runner(processes, cluster, config, bar.update)
            for number in range(rounds):
                for setup, policy in order(number):
                    bar.set_description(f"round {number + 1}, {setup}, {policy}")
                    turns.append(runner.turn(plan, setup, policy, number, texts, rate))
        return turns, rate


def _mean(turns: list[Turn], setup: str, policy: str, field: str) -> float:
    values = [getattr(turn, field) for turn in turns if (turn.setup, turn.policy) == (setup, policy)]
    return statistics.fmean(values)


def _table(turns: list[Turn], rate: float) -> Table:
    rounds = 1 + max(turn.round for turn in turns)
    title = f"{turns[0].requests} requests at {rate:.2f}/s, {rounds} round{'s' * (rounds > 1)}"
    table = Table(title=title, title_justify="left")
    for name in ("engines with", "policy"):
        table.add_column(name)
    for name in ("mean TTFT, ms", "by round", "p90, ms", "cached, %", "from the store, %"):
        table.add_column(name, justify="right")
    for setup, policies in POLICIES.items():
        for policy in policies:
            own = [turn for turn in turns if (turn.setup, turn.policy) == (setup, policy)]
            table.add_row(
                setup,
                policy,
                f"{_mean(turns, setup, policy, 'mean_ttft_ms'):.0f}",
                ", ".join(f"{turn.mean_ttft_ms:.0f}" for turn in own),
                f"{_mean(turns, setup, policy, 'p90_ttft_ms'):.0f}",
                f"{100 * _mean(turns, setup, policy, 'hit_rate'):.0f}",
                f"{100 * _mean(turns, setup, policy, 'store_rate'):.0f}",
            )
    return table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/bench router_policies",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    defaults = Plan()
    parser.add_argument(
        "--quick", action="store_true", help="the tiny model, nine short requests: does it work?"
    )
    parser.add_argument("--rounds", type=int, default=3, help="default: 3")
    parser.add_argument("--documents", type=int, default=defaults.documents, help="default: 6")
    parser.add_argument("--questions", type=int, default=defaults.questions, help="about each (default: 5)")
    parser.add_argument(
        "--load",
        type=float,
        default=defaults.load,
        help="arrivals, times what both engines could do without a cache (default: 1.2)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cache", type=Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
