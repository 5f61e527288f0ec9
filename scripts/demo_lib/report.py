"""The demo's figures: as a table for people, as one JSON object for programs."""

from typing import Any, NamedTuple

from rich import box
from rich.table import Table

from demo_lib.measure import Counters
from demo_lib.openai_client import Answer
from demo_lib.overlap import Overlap
from demo_lib.workload import Step


class Row(NamedTuple):
    """One request: ours, what it moved, and the same request on the plain engine."""

    step: Step
    ours: Answer
    moved: Counters
    plain: Answer

    @property
    def tokens_identical(self) -> bool:
        return self.ours.token_ids == self.plain.token_ids

    @property
    def ttft_ratio(self) -> float | None:
        if self.ours.ttft_ms is None or self.plain.ttft_ms is None:
            return None
        return self.ours.ttft_ms / self.plain.ttft_ms


def table(rows: list[Row]) -> Table:
    out = Table(
        title="Time to first token (TTFT): ours, and a plain vLLM that recomputes each prompt",
        box=box.SIMPLE_HEAD,
        title_justify="left",
        padding=(0, 1, 0, 0),
    )
    out.add_column("request", no_wrap=True)
    headings = [
        "prompt\ntokens",
        "tokens\nfrom store",
        "MB\nmoved",
        "TTFT\nours ms",
        "TTFT\nplain ms",
        "ratio",
    ]
    for heading in headings:
        out.add_column(heading, justify="right")
    out.add_column("greedy\ntokens")
    for row in rows:
        ratio = row.ttft_ratio
        out.add_row(
            row.step.name,
            str(row.ours.prompt_tokens),
            str(row.moved.tokens_from_store),
            f"{(row.moved.bytes_read + row.moved.bytes_written) / 1e6:.1f}",
            _ms(row.ours.ttft_ms),
            _ms(row.plain.ttft_ms),
            "-" if ratio is None else f"{ratio:.2f}",
            "identical" if row.tokens_identical else "[bold red]DIFFERENT[/]",
            style="bold" if row.step.measures_reuse else "",
        )
    return out


def summary(rows: list[Row], overlap: Overlap) -> list[str]:
    """The sentences under the table."""
    same = sum(row.tokens_identical for row in rows)
    lines = [f"Greedy tokens: identical to plain vLLM for {same} of {len(rows)} requests."]
    for row in rows:
        if row.step.measures_reuse and row.ttft_ratio is not None:
            lines.append(
                f"The decode engine had never seen the {row.ours.prompt_tokens}-token prompt of "
                f"'{row.step.name}': its first token took {row.ttft_ratio:.0%} of the time of computing it."
            )
    lines.append(overlap.sentence())
    return lines


def as_json(model: str, dtype: str, rows: list[Row], overlap: Overlap) -> dict[str, Any]:
    measured = next((row.ttft_ratio for row in rows if row.step.measures_reuse), None)
    return {
        "model": model,
        "dtype": dtype,
        "tokens_identical": all(row.tokens_identical for row in rows),
        "ttft_ratio": _rounded(measured),
        "overlap": overlap._asdict(),
        "requests": [
            {
                "name": row.step.name,
                "asked_of": row.step.target,
                "prompt_tokens": row.ours.prompt_tokens,
                "tokens_from_store": row.moved.tokens_from_store,
                "bytes_read": row.moved.bytes_read,
                "bytes_written": row.moved.bytes_written,
                "ttft_ms": _rounded(row.ours.ttft_ms),
                "total_ms": _rounded(row.ours.total_ms),
                "plain_ttft_ms": _rounded(row.plain.ttft_ms),
                "plain_total_ms": _rounded(row.plain.total_ms),
                "ttft_ratio": _rounded(row.ttft_ratio),
                "tokens_identical": row.tokens_identical,
            }
            for row in rows
        ],
    }


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
