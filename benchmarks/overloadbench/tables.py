"""What a reader gets to see."""

import itertools
from collections.abc import Sequence
from typing import Any

from policiesbench.figures import Difference, paired
from rich.table import Table

from overloadbench.plan import ADMISSIONS, Setup
from overloadbench.runner import Figures, added


def totals(turns: Sequence[Figures]) -> list[Figures]:
    return [added([turn for turn in turns if turn.admission == name]) for name in ADMISSIONS]


def differences(turns: Sequence[Figures], seed: int) -> dict[str, Difference]:
    """Of requests refused in a round: how many more the first of each pair refused."""
    of = {name: [turn for turn in turns if turn.admission == name] for name in ADMISSIONS}
    pairs = itertools.combinations(ADMISSIONS, 2)
    return {
        f"{more} - {fewer}": paired(of[more], of[fewer], lambda turn: float(turn.num_refused), seed)
        for more, fewer in pairs
    }


def figures_table(title: str, setup: Setup, counted_s: float, turns: Sequence[Figures]) -> Table:
    """`counted_s`: of a turn."""
    found = totals(turns)
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for one in found:
        table.add_column(one.admission, justify="right")

    def row(name: str, *cells: Any) -> None:
        table.add_row(name, *(f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in cells))

    row("offered", *(one.offered for one in found))
    row("refused", *(one.num_refused for one in found))
    for reason in sorted({reason for one in found for reason in one.refused}):
        row(f"  {reason}", *(one.refused.get(reason, 0) for one in found))
    row("prefilled in vain", *(one.prefilled_in_vain for one in found))
    row("answered", *(one.answered for one in found))
    row("SLO met, % of answered", *(100 * one.met_slo / max(one.answered, 1) for one in found))
    row("goodput, requests/s", *(one.met_slo / (one.round * counted_s) for one in found))
    row("goodput, tokens/s", *(round(one.good_tokens / (one.round * counted_s)) for one in found))
    if setup.block_size_tokens:
        row("prompt tokens cached, %", *(100 * one.cached_share for one in found))
    row("TTFT p50, ms", *(one.ttft_p50_ms for one in found))
    row(f"TTFT p90, ms (SLO {setup.ttft_slo_ms:g})", *(one.ttft_p90_ms for one in found))
    row("TBT p50, ms", *(one.tbt_p50_ms for one in found))
    row(f"TBT p90, ms (SLO {setup.tbt_slo_ms:g})", *(one.tbt_p90_ms for one in found))
    if any(one.late_p99_ms for one in found):
        row("sent late, p99, ms", *(one.late_p99_ms for one in found))
    return table


def differences_table(measured: Sequence[Figures], simulated: Sequence[Figures], seed: int) -> Table:
    table = Table(title="Refused more in a round [95 %], in how many rounds", title_justify="left")
    for name in ("", "measured", "simulated"):
        table.add_column(name, justify="left" if not name else "right")
    in_simulator = differences(simulated, seed)
    for pair, difference in differences(measured, seed).items():
        table.add_row(pair, _told(difference), _told(in_simulator[pair]))
    return table


def _told(difference: Difference) -> str:
    text = f"{difference.mean:.1f}"
    if difference.rounds > 1:
        text += f" [{difference.low:.1f}, {difference.high:.1f}]"
    return f"{text}, {difference.rounds_above} of {difference.rounds}"
