"""A night in which everything fails at once, with real engines: no wrong token, nothing hangs.

    scripts/bench bad_night [--minutes 20] [--seed N] [--only kill,flip] [--json FILE]

Two vLLM on CPU, two stores with an SSD each (one with a remote level in Valkey), routers with KV events, and
clients that ask about documents whose answers a plain vLLM has given before. Meanwhile stores are killed,
stopped, drained and restarted; their connections cut, delayed, ended in the middle, their bits changed; disks
filled and spoiled; engines killed in the middle of answers. Even seeds give each engine a store of its own,
odd ones both the same, and a router for prefill and decode as well. Ends with status 1 when a token was
wrong, when a request hung, or failed though no engine or router was in trouble, or when anything died by
itself or is left in the morning.
"""

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
from pathlib import Path

import aiohttp
import msgspec
from badnight.client import Asker
from badnight.faults import FAULTS
from badnight.members import Programs, tail
from badnight.night import Outcome, Plan, bad_night
from badnight.questions import Question, prompts
from rich.console import Console
from rich.table import Table
from storebench.processes import SystemFailed

from tests.engine.rig import end_process
from tests.engine.served import MODEL, vllm_server
from tests.remotes import valkey_server

_MIB = 1 << 20
_GOLDEN_TIMEOUT_S = 120.0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=20.0, help="of each night")
    parser.add_argument("--seed", type=int, nargs="+", default=[0], help="one night each")
    parser.add_argument("--only", default=",".join(FAULTS), help=f"of {', '.join(FAULTS)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    parser.add_argument("--model", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--engine-scripts", type=Path, required=True, help=argparse.SUPPRESS)
    args = parser.parse_args()
    faults = tuple(args.only.split(","))
    if unknown := set(faults) - FAULTS.keys():
        parser.error(f"--only: no such fault: {', '.join(sorted(unknown))}")
    programs = Programs(args.model, args.engine_scripts)
    try:
        truth = asyncio.run(_truth(programs))
        outcomes = []
        for seed in args.seed:
            outcomes.append(_one(programs, truth, Plan(seconds=args.minutes * 60, seed=seed, faults=faults)))
            Console().print(_table(outcomes[-1]))
            for complaint in outcomes[-1].complaints:
                print(f"bad_night: seed {seed}: {complaint}", file=sys.stderr)
    except (SystemFailed, AssertionError) as error:
        print(f"bad_night: {error}", file=sys.stderr)
        return 1
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(msgspec.to_builtins(outcomes), indent=2) + "\n")
    return 1 if any(outcome.complaints for outcome in outcomes) else 0


def _one(programs: Programs, truth: list[list[int]], plan: Plan) -> Outcome:
    folder = Path(tempfile.mkdtemp(prefix="night."))
    with valkey_server(folder) as server:
        remote = (server.url, server)
        outcome = asyncio.run(bad_night(folder, programs, truth, plan, _show_progress, remote))
    print(file=sys.stderr)
    if outcome.complaints:
        print(f"bad_night: what was logged is in {folder}", file=sys.stderr)
    else:
        shutil.rmtree(folder)
    return outcome


async def _truth(programs: Programs) -> list[list[int]]:
    """Of every prompt, by an engine that knows nothing of us."""
    _show_progress("a plain engine answers first")
    with tempfile.TemporaryDirectory(prefix="night.") as folder:
        log = Path(folder) / "plain.log"
        server = vllm_server(programs.model, None, log, scripts=programs.engine_scripts)
        try:
            await asyncio.to_thread(server.wait, "/health")
            async with aiohttp.ClientSession() as session:
                nothing = [[] for _ in prompts()]  # type: list[list[int]]
                asker = Asker(session, prompts(), nothing, MODEL, _GOLDEN_TIMEOUT_S)
                asked = [
                    await asker.ask("plain", server.url, Question(n, False)) for n in range(len(nothing))
                ]
            if failed := [one.detail for one in asked if not one.tokens]:
                raise SystemFailed(f"the plain engine: {failed[0]}\n{tail(log)}")
        finally:
            end_process(server.process)
    return [one.tokens for one in asked]


def _show_progress(text: str) -> None:
    print(
        f"\r\033[K{text}" if sys.stderr.isatty() else text,
        end="" if sys.stderr.isatty() else "\n",
        file=sys.stderr,
        flush=True,
    )


def _table(outcome: Outcome) -> Table:
    stores = "one store for both engines" if outcome.shares else "a store for each engine"
    table = Table(
        title=f"seed {outcome.seed}: {outcome.seconds / 60:.1f} minutes, {stores}", title_justify="left"
    )
    table.add_column("")
    table.add_column("", justify="right")
    for name, number in outcome.endings.items():
        table.add_row(f"requests {name}", str(number))
    table.add_row("the slowest answer, s", f"{outcome.slowest_s:.1f}")
    for name, number in outcome.troubles.items():
        table.add_row(f"fault: {name}", str(number))
    table.add_row("bits changed on the way", str(outcome.flipped_bits))
    for name, value in outcome.counted.items():
        if not name.endswith(("_bytes_total", "_seconds_total")):
            table.add_row(name, f"{value:.0f}")
    for name, sizes in outcome.rss_bytes.items():
        table.add_row(f"memory of {name}, MiB by thirds", ", ".join(str(size // _MIB) for size in sizes))
    table.add_row("complaints", str(len(outcome.complaints)))
    return table


if __name__ == "__main__":
    sys.exit(main())
