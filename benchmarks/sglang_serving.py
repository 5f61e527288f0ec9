"""SGLang serving with our backend, its own `file`, and its `mooncake`: real servers on CPU, a small model.

    scripts/bench sglang_serving [--quick] [--rounds N] [--vs file,mooncake] [--json FILE]

Each storage has two servers. In every round each first server computes and streams the answer to a new long
prompt while its pages go to the storage; each second server, which has not seen the prompt, then answers it
from there. A server without HiCache answers it too. Storages take turns within a round.

A line says: time to first token where the server computes the prompt, and where another has and it comes
from the storage; how many times faster that is than with `plain` (no HiCache), and with ours than with this
one; time between tokens while pages are saved, and how many times slower than with `plain`; how much of the
prompts came from the storage; how many answers are, token for token, those of `plain`. Exit status 1: an
answer that is another, or a prompt that did not come from ours. How fast pages move without a model:
`scripts/bench sglang`.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from sglangbench.plan import OURS, PEERS, SERVED_MODEL, Serving
from sglangbench.servers import ServerPair, Streamed
from sglangbench.storages import ROOT
from storebench.peers import cache_dir
from storebench.processes import SystemFailed

PLAIN = "plain"
WARM_UP_ROUNDS = 1


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """`computed`: the first server of each system; `from_storage`: the second."""

    computed: dict[str, Streamed]
    from_storage: dict[str, Streamed]


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    serving: Serving
    rounds: list[Round]
    left_out: dict[str, str]

    def systems(self) -> list[str]:
        """Those that have answered in every round."""
        wanted = list(self.rounds[0].computed) if self.rounds else []
        return [name for name in wanted if all(name in each.computed for each in self.rounds)]

    def ratio(self, of: Callable[[Round], float], to: Callable[[Round], float]) -> float:
        """The median over rounds of the ratio within one round."""
        return statistics.median(of(each) / to(each) for each in self.rounds)

    def median_ms(self, of: Callable[[Round], float]) -> float:
        return statistics.median(map(of, self.rounds)) * 1e3

    def num_identical(self, name: str) -> tuple[int, int]:
        """Answers of its servers that are those of the server without HiCache, and all of them."""
        pairs = [
            (answers[name].tokens, each.computed[PLAIN].tokens)
            for each in self.rounds
            for answers in (each.computed, each.from_storage)
            if name in answers
        ]
        return sum(found == wanted for found, wanted in pairs), len(pairs)

    def stored_percent(self, name: str) -> float:
        found = sum(each.from_storage[name].stored for each in self.rounds)
        return 100 * found / (len(self.rounds) * (self.serving.prompt_tokens - 1))


def served_model() -> Path:
    target = cache_dir().parent / "models" / "-".join(("bench", *SERVED_MODEL)).replace("--", "")
    command = [sys.executable, str(ROOT / "scripts" / "make_model.py"), "tiny", str(target), *SERVED_MODEL]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return target


def measure(
    serving: Serving, names: Sequence[str], directory: Path, tell: Callable[[str], None], model: Path
) -> Measured:
    rounds: list[Round] = []
    left_out: dict[str, str] = {}
    with ExitStack() as stack:
        pairs: list[ServerPair] = []
        for name in (PLAIN, *names):
            pair = ServerPair(name, serving, model, directory)
            stack.callback(pair.close)
            try:
                pair.launch()
                pairs.append(pair)
            except SystemFailed as error:
                left_out[name] = str(error)
        for pair in list(pairs):
            tell(f"waiting for the servers of {pair.name}")
            try:
                pair.wait_ready()
            except SystemFailed as error:
                left_out[pair.name] = str(error)
                pairs.remove(pair)
        for number in range(-WARM_UP_ROUNDS, serving.rounds):
            tell(f"round {number + 1} of {serving.rounds}")
            shift = number % len(pairs) if pairs else 0
            found = one_round(serving, pairs[shift:] + pairs[:shift], number + WARM_UP_ROUNDS, left_out)
            pairs = [pair for pair in pairs if pair.name not in left_out]
            if number >= 0 and PLAIN in found.computed:
                rounds.append(found)
    return Measured(serving=serving, rounds=rounds, left_out=left_out)


def one_round(serving: Serving, pairs: Sequence[ServerPair], number: int, left_out: dict[str, str]) -> Round:
    prompt = serving.prompt(number)
    computed: dict[str, Streamed] = {}
    from_storage: dict[str, Streamed] = {}
    for pair in pairs:
        try:
            answer = pair.first.stream(prompt, serving.answer_tokens)
            if pair.name != PLAIN:
                pair.first.wait_saved(serving.prompt_tokens - 1)
                from_storage[pair.name] = pair.second.stream(prompt, serving.answer_tokens)
            computed[pair.name] = answer
        except SystemFailed as error:
            left_out[pair.name] = str(error)
    return Round(computed=computed, from_storage=from_storage)


def show(console: Console, measured: Measured) -> bool:
    """Whether all is as it should be."""
    serving = measured.serving
    title = f"{serving.prompt_tokens} tokens of prompt, {serving.answer_tokens} of answer"
    table = Table(title=f"{title}: medians of {len(measured.rounds)} rounds", title_justify="left", box=None)
    table.add_column("storage")
    for heading in ("TTFT ms", "stored ms", "faster", "ours is", "TBT ms", "slower", "stored %", "same"):
        table.add_column(heading, justify="right")
    is_good = OURS[0] in measured.systems()
    for name in measured.systems():
        same, asked = measured.num_identical(name)
        stored = 100.0 if name == PLAIN else measured.stored_percent(name)
        is_good = is_good and same == asked and (name not in OURS or stored == 100)
        table.add_row(*cells(measured, name), f"{same}/{asked}")
    console.print(table)
    for system, reason in measured.left_out.items():
        console.print(f"{system} left out: {reason}", markup=False)
    return is_good


def cells(measured: Measured, name: str) -> list[str]:
    ttft, tbt = figure(name, "ttft_s"), figure(name, "tbt_s")
    row = [name, f"{measured.median_ms(ttft):.0f}"]
    tbt_text = f"{measured.median_ms(tbt):.2f}"
    if name == PLAIN:
        return [*row, "", "", "", tbt_text, "", ""]
    stored = figure(name, "ttft_s", from_storage=True)
    row += [
        f"{measured.median_ms(stored):.0f}",
        f"{measured.ratio(figure(PLAIN, 'ttft_s'), stored):.2f} x",
    ]
    ours = ""
    if name not in OURS and OURS[0] in measured.systems():
        ratio = measured.ratio(stored, figure(OURS[0], "ttft_s", from_storage=True))
        ours = f"{ratio:.2f} x"
    slower = f"{measured.ratio(tbt, figure(PLAIN, 'tbt_s')):.2f} x"
    return [*row, ours, tbt_text, slower, f"{measured.stored_percent(name):.0f}"]


def figure(name: str, kind: str, *, from_storage: bool = False) -> Callable[[Round], float]:
    def of(each: Round) -> float:
        answers = each.from_storage if from_storage else each.computed
        return float(getattr(answers[name], kind))

    return of


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a quarter of each prompt, two rounds")
    parser.add_argument(
        "--rounds", type=int, default=Serving().rounds, metavar="N", help="default: %(default)s"
    )
    parser.add_argument(
        "--vs",
        default=",".join(PEERS),
        metavar="A,B",
        help="%(default)s (the default), also ours-tcp, or none",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="every figure")
    args = parser.parse_args(argv)
    others = [] if args.vs == "none" else args.vs.split(",")
    if unknown := set(others) - {*PEERS, *OURS[1:]}:
        parser.error(f"--vs: {', '.join(sorted(unknown))} is none of {', '.join((*PEERS, *OURS[1:]))}")
    if args.rounds < 1:
        parser.error("--rounds must be above 0")
    serving = Serving(rounds=args.rounds)
    if args.quick:
        serving = Serving(prompt_pages=serving.prompt_pages // 4, rounds=min(2, args.rounds))
    console = Console(highlight=False)
    progress = Console(stderr=True, highlight=False)
    with tempfile.TemporaryDirectory(prefix="sglang-bench-") as directory:
        names = [OURS[0], *others]
        measured = measure(serving, names, Path(directory), progress.print, served_model())
    is_good = show(console, measured)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(msgspec.to_builtins(measured), indent=1) + "\n")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
