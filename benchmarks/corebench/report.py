"""Figures and outcomes as tables for people. A ratio is the median over rounds of that within one round."""

import statistics
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from corebench.behaviours import Outcome
from corebench.figures import Figure
from corebench.systems import COMPILED, OURS

RIGHT = "right"


def ratio(figures: Sequence[Figure], name: str, one: str, other: str) -> float | None:
    """CPU time or memory of `one` over that of `other`: below 1 where `one` needs less."""
    values = {(figure.system, figure.round): figure for figure in figures if figure.name == name}
    ratios = []
    for (system, number), mine in values.items():
        theirs = values.get((other, number))
        if system == one and theirs is not None:
            value = mine.value / theirs.value
            ratios.append(1 / value if mine.more_is_better else value)
    return statistics.median(ratios) if ratios else None


def print_figures(console: Console, figures: Sequence[Figure], systems: Sequence[str]) -> None:
    peers = [name for name in systems if name not in (OURS, COMPILED)]
    table = Table(title="medians over rounds, and ours in units of the peer's", title_justify="left")
    table.add_column("")
    table.add_column("unit")
    for name in systems:
        table.add_column(name, justify="right")
    compared = [(one, peer) for peer in peers for one in (OURS, COMPILED)]
    for one, peer in compared:
        table.add_column(f"{one} / {peer}", justify="right")
    for name in dict.fromkeys(figure.name for figure in figures):
        of_name = [figure for figure in figures if figure.name == name]
        cells = []
        for system in systems:
            values = [figure.value for figure in of_name if figure.system == system]
            cells.append(_number(statistics.median(values)) if values else "")
        for one, peer in compared:
            value = ratio(figures, name, one, peer)
            colour = "green" if value is not None and value <= 1 else "red"
            cells.append("" if value is None else f"[{colour}]{value:.2f}[/]")
        table.add_row(name, of_name[0].unit, *cells)
    console.print(table)


def print_outcomes(console: Console, outcomes: Sequence[Outcome], systems: Sequence[str]) -> None:
    table = Table(title="what is known of an engine's blocks after", title_justify="left")
    table.add_column("")
    for name in systems:
        table.add_column(name)
    found = {(outcome.behaviour, outcome.system): outcome for outcome in outcomes}
    for behaviour in dict.fromkeys(outcome.behaviour for outcome in outcomes):
        cells = []
        for name in systems:
            outcome = found.get((behaviour, name))
            cells.append("" if outcome is None else f"[red]{outcome.detail}[/]" if outcome.detail else RIGHT)
        table.add_row(behaviour, *cells)
    console.print(table)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"
