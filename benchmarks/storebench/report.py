"""The figures as a table for people and as JSON for programs."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from machine import machine_record
from rich.console import Console
from rich.table import Table

from storebench.plan import MIB, Budget
from storebench.stats import Figure
from storebench.systems.base import System
from storebench.targets import Verdict


def size_text(size_bytes: int) -> str:
    return f"{size_bytes // MIB} MiB" if size_bytes >= MIB else f"{size_bytes // 1024} KiB"


def print_tables(console: Console, figures: Sequence[Figure], verdicts: Sequence[Verdict]) -> None:
    """One line per thing measured, one column per system; all other figures are in the JSON."""
    for num_clients, of_clients in groupby(figures, key=lambda figure: figure.num_clients):
        console.print(_figure_table(num_clients, list(of_clients)))
    if verdicts:
        console.print(_verdict_table(verdicts))


def _figure_table(num_clients: int, figures: Sequence[Figure]) -> Table:
    if num_clients == 1:
        table = Table(title="one client process: p50 us, (GB/s at that latency)", title_justify="left")
    else:
        title = f"{num_clients} client processes: GB/s together, (p99 us)"
        table = Table(title=title, title_justify="left")
    table.add_column("op")
    table.add_column("value", justify="right")
    systems = list(dict.fromkeys(figure.system for figure in figures))
    for system in systems:
        table.add_column(system, justify="right", style="bold" if system.startswith("ours") else None)
    for (op, num_keys), of_op in groupby(figures, key=lambda figure: (figure.op, figure.num_keys)):
        for size_bytes, group in groupby(of_op, key=lambda figure: figure.size_bytes):
            cells = {figure.system: _cell_text(figure) for figure in group}
            table.add_row(
                f"{op} x{num_keys}" if num_keys > 1 else op,
                size_text(size_bytes),
                *(cells.get(system, "") for system in systems),
            )
        table.add_section()
    return table


def _cell_text(figure: Figure) -> str:
    call_bytes = 0 if figure.op == "exists" else figure.size_bytes * figure.num_keys
    if figure.num_clients > 1:
        text = f"{figure.gb_per_s:.2f} ({figure.p99_us:.0f})"
    elif call_bytes:
        text = f"{figure.p50_us:.0f} ({call_bytes / figure.p50_us / 1e3:.2f})"
    else:
        text = f"{figure.p50_us:.0f}"
    if figure.failures:
        text += f" [red]{figure.failures} of {figure.calls} failed[/]"
    if figure.wrong_bytes:
        text += f" [red]{figure.wrong_bytes} wrong bytes[/]"
    return text


def _verdict_table(verdicts: Sequence[Verdict]) -> Table:
    table = Table(title="times as fast as the other system, round by round", title_justify="left")
    for heading in ("what", "value", "compared with"):
        table.add_column(heading)
    for heading in ("ratio", "wanted", ""):
        table.add_column(heading, justify="right")
    for verdict in verdicts:
        table.add_row(
            f"{verdict.ours} {verdict.what}",
            size_text(verdict.size_bytes),
            verdict.peer,
            f"{verdict.ratio:.2f}",
            f">= {verdict.wanted_ratio:.2f}",
            "[green]met[/]" if verdict.met else "[red]missed[/]",
        )
    return table


def as_json(
    figures: Sequence[Figure],
    verdicts: Sequence[Verdict],
    systems: Sequence[System],
    failed: Mapping[str, str],
    budget: Budget,
    load_before: float,
) -> dict[str, Any]:
    """`load_before`: the 1-minute load average when the run began."""
    return {
        "systems": {system.name: system.about for system in systems},
        "machine": machine_record(load_before),
        "budget": budget._asdict(),
        "figures": [figure._asdict() for figure in figures],
        "targets": [{**verdict._asdict(), "met": verdict.met} for verdict in verdicts],
        "left_out": dict(failed),
    }
