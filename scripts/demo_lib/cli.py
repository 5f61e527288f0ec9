"""The demo from start to end."""

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from demo_lib import measure, overlap, report, workload
from demo_lib.cluster import ENGINE_ENV, MODEL_NAME, Cluster, Ports
from demo_lib.openai_client import Answer, ask
from demo_lib.processes import DemoError, Processes

ENGINE_START_TIMEOUT_S = 600.0  # three engines on a loaded two-core machine took three minutes
START_TIMEOUT_S = 60.0
# In bfloat16 a prompt computed in two parts rounds differently from one computed whole, so a near tie may
# give another token, with vLLM's own prefix cache as with ours. float32 keeps the comparison exact.
DTYPE = "float32"
MODELS = ("smollm2", "tiny")
# A file or a pipe has no width of its own; the table needs this much.
console = Console(stderr=True, width=None if sys.stderr.isatty() else 100)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    # SIGTERM must end the children as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    run_dir = Path(tempfile.mkdtemp(prefix="mooncake-demo-"))
    try:
        model_dir = make_model(args.model, args.cache)
        with Processes(run_dir) as processes:
            cluster = Cluster(Ports.free(), model_dir, DTYPE, run_dir)
            start(processes, cluster)
            figures = run(cluster, args.model)
            if args.keep:
                processes.keep()
                explain_kept(processes, cluster)
        if not args.keep:
            shutil.rmtree(run_dir)
    except DemoError as error:
        console.print(f"[bold red]demo failed[/]: {error}", highlight=False, soft_wrap=True)
        console.print(f"logs are in {run_dir}", highlight=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        shutil.rmtree(run_dir)
        console.print("interrupted; everything that was started has been ended")
        return 130
    if args.json:
        print(json.dumps(figures), flush=True)
    return 0 if figures["tokens_identical"] else 1


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", choices=MODELS, default="smollm2", help="default: %(default)s")
    parser.add_argument("--keep", action="store_true", help="leave it running and say how to use and end it")
    parser.add_argument("--json", action="store_true", help="figures as one JSON object on the last line")
    parser.add_argument("--cache", type=Path, required=True, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def make_model(model: str, cache: Path) -> Path:
    out = cache / "models" / model
    script = Path(__file__).resolve().parent.parent / "make_model.py"
    made = subprocess.run([sys.executable, script, model, out], stdout=subprocess.DEVNULL, check=False)
    if made.returncode:
        raise DemoError(f"the model could not be made ({script} {model} {out})")
    return out


def start(processes: Processes, cluster: Cluster) -> None:
    ports = cluster.ports
    commands = {
        "store": (cluster.store(), f"{ports.url('store_admin')}/ready"),
        "prefill": (cluster.engine("prefill"), f"{ports.url('prefill')}/health"),
        "decode": (cluster.engine("decode"), f"{ports.url('decode')}/health"),
        "plain": (cluster.plain(), f"{ports.url('plain')}/health"),
        "router": (cluster.router(), f"{ports.url('router')}/ready"),
    }
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=len(commands))

        def ready(name: str) -> None:
            progress.update(task, advance=1, description=f"{name} is ready")
            if not console.is_terminal:
                console.print(f"{name} is ready")

        # The store first: an engine that finds none would only note it and try again later.
        for names in (("store",), ("prefill", "decode", "plain"), ("router",)):
            for name in names:
                # vLLM leaves sockets and files behind in TMPDIR; there they go with the folder.
                processes.start(name, commands[name][0], {**ENGINE_ENV, "TMPDIR": str(processes.log_dir)})
            timeout_s = ENGINE_START_TIMEOUT_S if "plain" in names else START_TIMEOUT_S
            processes.wait_until_ready({name: commands[name][1] for name in names}, timeout_s, ready)


def run(cluster: Cluster, model: str) -> dict[str, Any]:
    """Asks everything of both, prints the table, returns the figures."""
    ports, tiny = cluster.ports, model == "tiny"

    def read_counters() -> measure.Counters:
        return measure.read(ports)

    for target in ("prefill", "decode", "plain", "router"):
        ask(ports.url(target), workload.warm_up(tiny))
    begin = before = measure.read_settled(read_counters)
    rows: list[report.Row] = []
    answers: list[Answer] = []
    for step in workload.steps(tiny):
        request = step.build(answers)
        console.print(f"asking: {step.name}", style="dim")
        answers.append(ask(ports.url(step.target), request))
        after = measure.read_settled(read_counters)
        plain = ask(ports.url("plain"), request)
        rows.append(report.Row(step, answers[-1], after.since(before), plain))
        before = after
    seen = overlap.measure(
        cluster.trace_path("prefill"),
        cluster.trace_path("decode"),
        before.since(begin).layers_read_before_seal,
    )
    console.print(report.table(rows))
    for line in report.summary(rows, seen):
        console.print(line, highlight=False, soft_wrap=True)
    return report.as_json(model, cluster.dtype, rows, seen)


def explain_kept(processes: Processes, cluster: Cluster) -> None:
    router, admin = cluster.ports.url("router"), cluster.ports.url("store_admin")
    body = json.dumps({"model": MODEL_NAME, "prompt": "The printing press", "max_tokens": 16})
    pids = " ".join(str(running.process.pid) for running in processes.running)
    console.print(
        f"""
It is still running. Try:
  curl -s {router}/v1/completions -H 'Content-Type: application/json' -d '{body}'
  curl -s {admin}/stats
  {Path(sys.executable).parent / "mooncake-store"} ls --address 127.0.0.1:{cluster.ports.store}
logs are in {processes.log_dir}; this ends it:
  kill {pids}""",
        highlight=False,
        soft_wrap=True,
    )
