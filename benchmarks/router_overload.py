"""What admission does when twice as many requests come as a cluster can serve.

    scripts/bench router_overload [--quick] [--rounds N] [--profile FILE] [--json FILE]
    scripts/bench router_overload --trace TRACE.jsonl [--speed 2] [--rounds 6] [--compress 15]

Stand-in engines behind mooncake-router take as long for a prompt and for a decode step as the engine whose
profile they are given, queue as it would, and use no computing time for it. Each admission policy is offered
the same requests, which come by themselves and do not wait for each other:

  baseline     TTFT is looked at when a request comes, the decode load when its prefill is done
  early        both when it comes
  predictive   the decode load as it will be when its prefill is done, if all decode equally long
  predictive_request   the same, with the output length that was seen before as what each may have

`refused` counts requests by the router's reason. `prefilled in vain` are those whose prompt was computed by
a prefill engine and which no decode engine ever saw; the engines count them, not the router. `SLO met` is
the share of the answered ones that kept both SLOs as their clients measured them (TBT: the mean of a
request), `goodput` the requests a second that did, and the tokens in them.

Without --trace: two prefill engines and one that decodes, Poisson arrivals, prompts that share nothing. The
lengths are such that prefill and decode are about equally busy: then a prefill in vain takes the place of
somebody who could have been served. Capacity is what the slower of the two sides can do within its SLO, from
the models. The default models are the router's own (8B on one GPU); `mooncake-router profile` measures
others.

With --trace: a trace as kvsim reads it (with hash_ids, from which prompts are made that share what the
trace's do), cut into a part for each round and replayed at --speed against 8 prefill and 8 decode nodes as
the simulator has them (8 x A800, LLaMA3-70B, TTFT 30 s, TBT 100 ms, the paper's overload experiment). The
prefill engines remember every prompt. The simulator replays the same parts with the same settings, and its
figures stand beside the measured ones.

An hour of that would take an hour, so everything that has a duration is --compress times as fast: the
engines, the arrivals, the SLOs and the models the router predicts with. All reported times are multiplied
again. Only what really takes time here, the router's work and the delays of this machine, counts --compress
times as much; `--compress 1 --quick` shows how little that is on a machine with nothing else to do. On one
that is busy, requests are sent late, and such a turn is played again; if that does not help, its figures are
said to be worthless. Prompts are not shortened.
"""

import argparse
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace
from overloadbench import tables
from overloadbench.plan import ADMISSIONS, Models, Plan, Request, Setup, requests
from overloadbench.replay import Replay, as_answers, part
from overloadbench.runner import Figures, run_turn, summed_up
from rich.console import Console
from storebench.processes import SystemFailed
from tqdm import tqdm

from kvcore.config import read_file
from kvcore.errors import ConfigError
from kvsim.runs import read_any, simulate
from router.core.settings import Settings

_WIDTH_IN_A_PIPE = 120
# Of the TTFT SLO.
_LATE_SHARE = 0.05


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What is offered. `seconds`: of a round; `document`: of it for the JSON file."""

    setup: Setup
    seconds: float
    rounds: int
    title: str
    num_requests: int
    offered: Callable[[int], Sequence[Request]]
    simulated: Callable[[str, int], Figures] | None
    document: dict[str, object]

    @property
    def late_limit_ms(self) -> float:
        """How late requests may be sent. A delay of all takes that much away from TTFT."""
        return _LATE_SHARE * self.setup.ttft_slo_ms


def main(argv: list[str] | None = None) -> int:
    """1 when requests failed, or when early or predictive prefilled in vain; 2 for what cannot be run."""
    args = _parser().parse_args(argv)
    # A plain exit runs the clean-up that ends every process started here.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        if min(args.attempts, args.rounds or 1, args.prefill_nodes, args.decode_nodes) < 1:
            raise ConfigError("--attempts, --rounds, --prefill-nodes and --decode-nodes must be at least 1")
        load = _trace(args) if args.trace else _poisson(args)
        measured, simulated = _run(load, args.attempts)
    except (ConfigError, SystemFailed) as error:
        print(f"router_overload: {error}", file=sys.stderr)
        return 2
    console = Console() if sys.stdout.isatty() else Console(width=_WIDTH_IN_A_PIPE)
    counted_s = load.seconds - load.setup.warm_up_s
    console.print(tables.figures_table(load.title, load.setup, counted_s, measured))
    document = {**load.document, "totals": tables.totals(measured), "turns": measured}
    if simulated:
        console.print(tables.figures_table("The same, simulated", load.setup, counted_s, simulated))
        console.print(tables.differences_table(measured, simulated, args.seed))
        document |= {"simulated_totals": tables.totals(simulated), "simulated_turns": simulated}
        document["refused_more"] = tables.differences(measured, args.seed)
        document["refused_more_simulated"] = tables.differences(simulated, args.seed)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")
    complaints = _complaints(tables.totals(measured))
    for complaint in (*complaints, *_too_busy(load, measured)):
        print(f"router_overload: {complaint}", file=sys.stderr)
    return 1 if complaints else 0


def _complaints(totals: Sequence[Figures]) -> list[str]:
    complaints = [f"{one.admission}: {text}" for one in totals for text in one.failures]
    return complaints + [
        f"{one.admission}: {one.prefilled_in_vain} requests were prefilled in vain"
        for one in totals
        if one.admission != "baseline" and one.prefilled_in_vain
    ]


def _too_busy(load: Load, turns: Sequence[Figures]) -> list[str]:
    limit_ms = load.late_limit_ms
    return [
        f"round {turn.round + 1}, {turn.admission}: requests were sent up to {turn.late_p99_ms:.0f} ms late, "
        f"more than {limit_ms:.0f}: the machine was too busy to play this cluster, its figures say nothing"
        for turn in turns
        if turn.late_p99_ms > limit_ms
    ]


def _poisson(args: argparse.Namespace) -> Load:
    seconds = min(args.seconds, 15.0) if args.quick else args.seconds
    setup = Setup(
        warm_up_s=5.0 if args.quick else seconds / 4,
        ttft_slo_ms=args.ttft_slo_ms or Setup().ttft_slo_ms,
        tbt_slo_ms=args.tbt_slo_ms or Setup().tbt_slo_ms,
    )
    if args.profile:
        tables_ = read_file(args.profile).get("scheduling", {})
        try:
            settings = msgspec.convert(tables_, Settings)
        except msgspec.ValidationError as error:
            raise ConfigError(
                f"{args.profile}: {error}; write what `mooncake-router profile` prints"
            ) from error
        setup = replace(setup, models=Models(settings.prefill_model, settings.decode_model))
    plan = Plan(setup=setup, load=args.load, seconds=seconds, seed=args.seed)
    if plan.capacity_per_s <= 0:
        raise ConfigError(
            f"not one request decodes within {setup.tbt_slo_ms} ms a token on this engine: raise --tbt-slo-ms"
        )
    rounds = args.rounds or 1
    return Load(
        setup=replace(setup, decode_ms=plan.decode_ms),
        seconds=seconds,
        rounds=rounds,
        title=(
            f"{plan.load:g} x capacity: {plan.load * plan.capacity_per_s:.1f} requests/s to "
            f"{setup.num_prefill} prefill ({plan.prefill_per_s:.1f}/s) and {setup.num_decode} decode engines "
            f"({plan.decode_per_s:.1f}/s)"
        ),
        num_requests=sum(len(list(requests(plan, number))) for number in range(rounds)),
        offered=lambda number: list(requests(plan, number)),
        simulated=None,
        document={
            "plan": plan,
            "capacity_per_s": {"prefill": plan.prefill_per_s, "decode": plan.decode_per_s},
        },
    )


def _trace(args: argparse.Namespace) -> Load:
    defaults = Replay(path=str(args.trace), length_s=1.0)
    if min(args.speed, args.compress) <= 0:
        raise ConfigError("--speed and --compress must be positive")
    trace = read_any(str(args.trace), defaults.block_size_tokens)
    replay = replace(
        defaults,
        # The last request is to be in the last part.
        length_s=trace.duration_s + 1e-3,
        speed=args.speed,
        rounds=args.rounds or defaults.rounds,
        num_prefill=args.prefill_nodes,
        num_decode=args.decode_nodes,
        ttft_slo_ms=args.ttft_slo_ms or defaults.ttft_slo_ms,
        tbt_slo_ms=args.tbt_slo_ms or defaults.tbt_slo_ms,
        compress=args.compress,
    )
    only = 1 if args.quick else replay.rounds

    def simulated(admission: str, number: int) -> Figures:
        answers, counted = as_answers(simulate(replay.sim_config(admission, number)).outcomes)
        return summed_up(replay.setup, admission, number, answers, counted)

    return Load(
        setup=replay.setup,
        seconds=replay.seconds,
        rounds=only,
        title=(
            f"{trace.name} x {replay.speed:g} to {replay.num_prefill} prefill and {replay.num_decode} "
            f"decode nodes, {only} of {replay.rounds} parts of {replay.seconds:.0f} s, compressed "
            f"{replay.compress:g} x"
        ),
        num_requests=sum(request.at < only * replay.part_s for request in trace.requests),
        offered=lambda number: part(replay, trace, number),
        simulated=simulated,
        document={"replay": replay},
    )


def _run(load: Load, attempts: int) -> tuple[list[Figures], list[Figures]]:
    """(measured, simulated)"""
    measured, simulated = [], []
    with (
        tempfile.TemporaryDirectory(prefix="overload.") as name,
        tqdm(
            total=load.num_requests * len(ADMISSIONS), unit=" requests", dynamic_ncols=True, file=sys.stderr
        ) as bar,
    ):
        for number in range(load.rounds):
            offered = load.offered(number)
            turn_of = number % len(ADMISSIONS)
            for admission in (*ADMISSIONS[turn_of:], *ADMISSIONS[:turn_of]):
                bar.set_description(f"round {number + 1}, {admission}")
                if load.simulated is not None:
                    simulated.append(load.simulated(admission, number))
                for attempt in range(1, attempts + 1):
                    folder = Path(name) / f"{number}-{admission}-{attempt}"
                    turn = run_turn(
                        load.setup, offered, admission, number, folder, lambda: bar.update() and None
                    )
                    if turn.late_p99_ms <= load.late_limit_ms or attempt == attempts:
                        break
                    bar.total += len(offered)
                measured.append(turn)
    return measured, simulated


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/bench router_overload",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    plan, replay = Plan(), Replay(path="", length_s=1.0)
    parser.add_argument("--quick", action="store_true", help="turns of 15 seconds, or one part of the trace")
    parser.add_argument("--rounds", type=int, help="of a turn for each policy (default: 1; 6 with --trace)")
    parser.add_argument("--seconds", type=float, default=plan.seconds, help="of a turn (default: 45)")
    parser.add_argument("--load", type=float, default=plan.load, help="times capacity (default: 2)")
    parser.add_argument("--ttft-slo-ms", type=float, help="(default: 2200; 30000 with --trace)")
    parser.add_argument("--tbt-slo-ms", type=float, help="(default: 27.5; 100 with --trace)")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals and lengths, and of intervals")
    parser.add_argument(
        "--profile",
        type=Path,
        metavar="FILE",
        help="a .toml with what `mooncake-router profile` measured; SLOs must fit it",
    )
    parser.add_argument(
        "--attempts", type=int, default=3, help="at a turn that the machine is too busy for (default: 3)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    traces = parser.add_argument_group("with a trace")
    traces.add_argument("--trace", type=Path, metavar="FILE", help="such as conversation_trace.jsonl")
    traces.add_argument("--speed", type=float, default=replay.speed, help="of the replay (default: 2)")
    traces.add_argument(
        "--compress", type=float, default=replay.compress, help="all durations divided by it (default: 15)"
    )
    traces.add_argument("--prefill-nodes", type=int, default=replay.num_prefill, help="(default: 8)")
    traces.add_argument("--decode-nodes", type=int, default=replay.num_decode, help="(default: 8)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
