"""What a reader gets to see."""

from collections.abc import Sequence

from rich.table import Table

from connectorbench.figures import PLAIN, Ratio, Sample, identical, loaded_share, median_ms, of, ratio
from connectorbench.plan import BESIDE, CACHED, COLD, OTHER, OWN, SPLIT, STREAM

_REUSE = {
    COLD: "cold: TTFT, ms",
    OTHER: "another engine's: TTFT, ms",
    OWN: "own, after a reset: TTFT, ms",
    STREAM: "stream beside a save, ms/token",
    BESIDE: "TTFT beside it, ms",
}
_SPLIT = {SPLIT: "TTFT, ms"}
_LOADED = {OWN: (OTHER, OWN), SPLIT: (SPLIT,)}  # behind which column, of which answers


def names(samples: Sequence[Sample]) -> list[str]:
    """In the order of their first answers."""
    return list(dict.fromkeys(sample.system for sample in samples))


def reuse_table(samples: Sequence[Sample]) -> Table:
    return _table(samples, "Reuse through a store; in brackets the ratio to plain vLLM [95 %]", _REUSE)


def split_table(samples: Sequence[Sample]) -> Table:
    return _table(samples, "One prefill and one decode engine behind mooncake-router", _SPLIT)


def floor_line(samples: Sequence[Sample]) -> str:
    """What no connector can beat; empty when it was not measured."""
    found, own = median_ms(samples, PLAIN, CACHED), ratio(samples, PLAIN, CACHED, PLAIN)
    if found is None or own is None:
        return ""
    return (
        f"The same prompt from vLLM's own cache: {found:.0f} ms ({_told(own)}), which no connector can beat."
    )


def against_lines(samples: Sequence[Sample]) -> list[str]:
    """Ours beside each peer, within rounds: below 1, ours takes less time."""
    found, systems = [], names(samples)
    ours = [name for name in systems if name.startswith("ours")]
    for peer in (name for name in systems if name not in (PLAIN, *ours)):
        for own in ours:
            told = [
                f"{figure} {_told(against)}"
                for figure in (*_REUSE, *_SPLIT)
                if (against := ratio(samples, own, figure, peer))
            ]
            if told:
                found.append(f"{own} / {peer}: {', '.join(told)}")
    return found


def _table(samples: Sequence[Sample], title: str, figures: dict[str, str]) -> Table:
    table = Table(title=title, title_justify="left", min_width=len(title))
    table.add_column("system")
    for figure, heading in figures.items():
        table.add_column(heading, justify="right")
        if figure in _LOADED:
            table.add_column("loaded", justify="right")
    table.add_column("tokens as plain", justify="right")
    for name in names(samples):
        if not any(of(samples, name, figure) for figure in figures):
            continue
        row = [name]
        for figure in figures:
            row.append(_cell(samples, name, figure))
            if figure in _LOADED:
                share = None if name == PLAIN else loaded_share(samples, name, _LOADED[figure])
                row.append("" if share is None else f"{100 * share:.0f} %")
        same = identical([s for s in samples if s.system == PLAIN or s.figure in figures], name)
        table.add_row(*row, "" if name == PLAIN else f"{same.same} of {same.answers}")
    return table


def _cell(samples: Sequence[Sample], name: str, figure: str) -> str:
    found = median_ms(samples, name, figure)
    if found is None:
        return ""
    to_plain = None if name == PLAIN else ratio(samples, name, figure, PLAIN)
    digits = 1 if found < 100 else 0
    return f"{found:.{digits}f}" + (f" ({_told(to_plain)})" if to_plain else "")


def _told(found: Ratio) -> str:
    if found.rounds == 1:
        return f"{found.mean:.2f}"
    return f"{found.mean:.2f} [{found.low:.2f}, {found.high:.2f}]"
