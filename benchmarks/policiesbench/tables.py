"""What a reader gets to see."""

import itertools
import statistics
from collections.abc import Callable, Sequence

from rich.table import Table

from policiesbench.cells import PAPER, SPLIT, Cell
from policiesbench.figures import Difference, Turn, mean_ttft_ms, paired, quantile, tbt_quantile

Turns = dict[Cell, list[Turn]]


def by_cell(turns: Sequence[Turn]) -> Turns:
    found: Turns = {}
    for turn in turns:
        found.setdefault(Cell(turn.engines, turn.routed), []).append(turn)
    return found


def differences(turns: Turns, seed: int) -> dict[Cell, Difference]:
    """Of mean TTFT: how much the one before it in the paper's order was slower, in ms."""
    return {
        after: paired(turns[before], turns[after], mean_ttft_ms, seed)
        for before, after in itertools.pairwise(PAPER)
    }


def policies_table(turns: Turns, rate_per_s: float, seed: int) -> Table:
    found = differences(turns, seed)
    rows = {}
    for cell, own in turns.items():
        difference = found.get(cell)
        rows[cell] = [
            f"{_mean(own, mean_ttft_ms):.0f}",
            f"{quantile([ttft for turn in own for ttft in turn.ttfts_ms], 0.9):.0f}",
            _told(difference, 0) if difference else "",
            f"{difference.rounds_above} of {difference.rounds}" if difference else "",
            f"{_mean(own, lambda turn: 100 * turn.hit_rate):.0f}",
            f"{_mean(own, lambda turn: 100 * turn.store_rate):.0f}",
        ]
    columns = ("mean TTFT, ms", "p90, ms", "faster than the row above, ms [95 %]", "rounds", "cached, %")
    return _table(rows, (*columns, "from the store, %"), turns, rate_per_s)


def layouts_table(turns: Turns, rate_per_s: float, seed: int) -> Table:
    """The last row: how much less the split layout has of each, with intervals."""
    figures: dict[str, tuple[int, Callable[[Turn], float]]] = {
        "mean TTFT, ms": (0, mean_ttft_ms),
        "TTFT p90, ms": (0, lambda turn: quantile(turn.ttfts_ms, 0.9)),
        "TBT p50, ms": (1, tbt_quantile(0.5)),
        "TBT p90, ms": (1, tbt_quantile(0.9)),
        "TBT p99, ms": (1, tbt_quantile(0.99)),
        "cached, %": (0, lambda turn: 100 * turn.hit_rate),
        "from the store, %": (0, lambda turn: 100 * turn.store_rate),
    }
    rows = {
        cell: [f"{_mean(own, figure):.{digits}f}" for digits, figure in figures.values()]
        for cell, own in turns.items()
    }
    table = _table(rows, tuple(figures), turns, rate_per_s)
    (split,) = (cell for cell in turns if cell.routed == SPLIT)
    (mixed,) = (cell for cell in turns if cell.routed != SPLIT)
    compared = list(figures.values())[:5]
    told = [_told(paired(turns[split], turns[mixed], figure, seed), digits) for digits, figure in compared]
    table.add_section()
    table.add_row("", "split minus mixed [95 %]", *told)
    return table


def _mean(turns: Sequence[Turn], figure: Callable[[Turn], float]) -> float:
    return statistics.fmean(figure(turn) for turn in turns)


def _told(difference: Difference, digits: int) -> str:
    text = f"{difference.mean:.{digits}f}"
    if difference.rounds == 1:
        return text
    return f"{text} [{difference.low:.{digits}f}, {difference.high:.{digits}f}]"


def _table(rows: dict[Cell, list[str]], columns: tuple[str, ...], turns: Turns, rate_per_s: float) -> Table:
    some = next(iter(turns.values()))
    rounds = len(some)
    title = f"{len(some[0].samples)} requests at {rate_per_s:.2f}/s, {rounds} round{'s' * (rounds > 1)}"
    table = Table(title=title, title_justify="left")
    for name in ("engines with", "routed"):
        table.add_column(name)
    for name in columns:
        table.add_column(name, justify="right")
    for cell, texts in rows.items():
        table.add_row(*cell, *texts)
    return table
