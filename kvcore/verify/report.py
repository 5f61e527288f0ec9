"""A report for people (rich) and for programs (JSON)."""

import msgspec

from kvcore.verify.engine import VerifyError
from kvcore.verify.run import Report
from kvcore.verify.verdict import Answer

EXIT_STATUS = {"passed": 0, "failed": 1, "undecided": 2}
_COLOURS = {"passed": "bold green", "failed": "bold red", "undecided": "bold yellow"}


def to_json(report: Report) -> str:
    return msgspec.json.format(msgspec.json.encode(report), indent=2).decode()


def error_json(error: VerifyError) -> str:
    fields = {"outcome": "undecided", "code": "error", "sentence": str(error), "hints": [error.advice]}
    return msgspec.json.format(msgspec.json.encode({"verdict": fields}), indent=2).decode()


def print_report(report: Report) -> None:
    """Needs rich: ImportError if it is not installed."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    title = f"{report.engine}\nand then {report.second_engine}" if report.second_engine else report.engine
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for heading in ("request", "prompt tokens", "own cache", "store", "seconds", "tokens"):
        table.add_column(heading, justify="left" if heading in ("request", "tokens") else "right")
    last = "second engine" if report.second_engine else "after a flush"
    rows: list[tuple[str, Answer]] = [
        ("first", report.cold),
        ("repeated", report.warm),
        (last, report.restored),
    ]
    for name, answer in rows:
        same = (
            "-" if answer is report.cold else "identical" if answer.tokens == report.cold.tokens else "differ"
        )
        own: int | str = "not said"
        if answer.cached_tokens is not None and answer.store_tokens is not None:
            own = answer.cached_tokens - answer.store_tokens
        store = "not said" if answer.store_tokens is None else answer.store_tokens
        table.add_row(name, str(answer.prompt_tokens), str(own), str(store), f"{answer.seconds:.3f}", same)
    console.print(table)
    verdict = report.verdict
    console.print(
        Text(f"\n{verdict.outcome.upper()}: ", _COLOURS[verdict.outcome]) + Text(verdict.sentence, "")
    )
    for hint in report.hints:
        console.print(Text(f"  - {hint}"))
