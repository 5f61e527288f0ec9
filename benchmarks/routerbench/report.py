"""The figures as tables for people, as JSON for programs and as one picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from machine import machine_record
from rich.console import Console
from rich.table import Table

from routerbench.cases import CASES
from routerbench.figures import Figure, Summary, summaries
from routerbench.systems import DIRECT, FLOORS, System
from routerbench.targets import Verdict


def print_tables(console: Console, figures: Sequence[Figure], verdicts: Sequence[Verdict]) -> None:
    found = summaries(figures)
    for case in dict.fromkeys(summary.case for summary in found):
        console.print(_case_table(case, [summary for summary in found if summary.case == case]))
    if verdicts:
        console.print(_verdict_table(verdicts))


def _case_table(case: str, found: Sequence[Summary]) -> Table:
    table = Table(title=f"{case}: {CASES[case].about}", title_justify="left")
    table.add_column("")
    headings = [
        "CPU us/request",
        "x relay in C",
        "CPU us/chunk",
        "p50 us",
        "p99 us",
        "first token p50 us",
        "engine calls",
        "requests/s",
    ]
    streams, prompts = CASES[case].stream, CASES[case].has_prompts
    shown = {"CPU us/chunk": streams, "first token p50 us": streams, "engine calls": prompts}
    for heading in headings:
        if shown.get(heading, True):
            table.add_column(heading, justify="right")
    floor_us = next((one.cpu_us for one in found if one.system == FLOORS[0].name), 0.0)
    for one in found:
        has_cpu = one.system != DIRECT
        cells = [f"{one.cpu_us:.1f}" if has_cpu else ""]
        cells.append(f"{one.cpu_us / floor_us:.1f}" if has_cpu and floor_us else "")
        if streams:
            cells.append(f"{one.cpu_us_per_chunk:.2f}" if has_cpu else "")
        cells += [f"{one.p50_us:.0f}", f"{one.p99_us:.0f}"]
        if streams:
            cells.append(f"{one.first_token_p50_us:.0f}")
        if prompts:
            cells.append(f"{one.engine_calls:.1f}" if has_cpu else "")
        cells.append(f"{one.requests_per_s:.0f}")
        name = f"{one.system} [red]({one.errors} errors)[/]" if one.errors else one.system
        table.add_row(name, *cells, style="bold" if one.system == "ours" else None)
    return table


def _verdict_table(verdicts: Sequence[Verdict]) -> Table:
    table = Table(title="ours (Algorithm 1, index, admission), round by round", title_justify="left")
    for heading in ("what", "load", "compared with"):
        table.add_column(heading)
    for heading in ("ours", *(floor.name for floor in FLOORS), "target"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for verdict in verdicts:
        floors = [verdict.floors.get(floor.name) for floor in FLOORS]
        table.add_row(
            verdict.what,
            CASES[verdict.case].about,
            verdict.other,
            f"{verdict.value:.2f} {verdict.unit}",
            *("" if value is None else f"{value:.2f} {verdict.unit}" for value in floors),
            f"<= {verdict.limit:g} {verdict.unit}",
            _outcome(verdict),
        )
    return table


def _outcome(verdict: Verdict) -> str:
    if verdict.is_met:
        return "[green]met[/]"
    if verdict.is_out_of_reach:
        return "[yellow]missed; out of reach here[/]"
    return "[red]missed[/]"


def as_json(
    figures: Sequence[Figure],
    verdicts: Sequence[Verdict],
    systems: Sequence[System],
    failed: Mapping[str, str],
    load_before: float,
    num_engines: int,
) -> dict[str, Any]:
    """`load_before`: the 1-minute load average when the run began."""
    return {
        "systems": {system.name: system.about for system in systems},
        "engines": num_engines,
        "cases": {name: case.about for name, case in CASES.items()},
        "machine": machine_record(load_before),
        "figures": msgspec.to_builtins(list(figures)),
        "targets": [
            {**msgspec.to_builtins(verdict), "met": verdict.is_met, "out_of_reach": verdict.is_out_of_reach}
            for verdict in verdicts
        ],
        "left_out": dict(failed),
    }


def save_plot(figures: Sequence[Figure], path: Path) -> None:
    """PNG (or what the suffix says). Needs matplotlib, from the `bench` extra."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = [summary for summary in summaries(figures) if summary.system != DIRECT]
    cases = list(dict.fromkeys(summary.case for summary in found))
    columns = min(len(cases), 4)
    rows = -(-len(cases) // columns)
    picture, axes = pyplot.subplots(
        rows, columns, figsize=(4.6 * columns, 3.2 * rows), layout="constrained", squeeze=False
    )
    for axis in axes.flat[len(cases) :]:
        axis.set_visible(False)
    for case, axis in zip(cases, axes.flat, strict=False):
        shown = [summary for summary in found if summary.case == case][::-1]
        bars = axis.barh(
            [summary.system for summary in shown],
            [summary.cpu_us for summary in shown],
            color=["#2b64a0" if summary.system.startswith("ours") else "#b9c3ce" for summary in shown],
        )
        axis.bar_label(bars, fmt="%.0f", padding=3, fontsize=8)
        axis.margins(x=0.15)
        axis.set_title(CASES[case].about, fontsize=10)
        axis.tick_params(labelsize=8)
    picture.supxlabel("CPU time of the router a request, us (less is better)", fontsize=10)
    picture.savefig(path, dpi=110)
    pyplot.close(picture)
