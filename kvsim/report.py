"""Results for people and for programs: a self-contained HTML page, PNG files, JSON."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvsim import plots
from kvsim.hit_rate import HitRate
from kvsim.metrics import Summary
from kvsim.paper.base import Figure
from kvsim.runs import Result

Figures = dict[str, bytes]  # by file stem

_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 1100px; padding: 0 1em; color: #222
} table { border-collapse: collapse; margin: 1em 0; font-variant-numeric: tabular-nums }
th, td { padding: .25em .7em; border-bottom: 1px solid #ddd; text-align: right }
th:first-child, td:first-child { text-align: left }
img { max-width: 100% } details { margin: 1em 0 } pre { background: #f6f6f6; padding: 1em; overflow: auto }
"""

COLUMNS = (
    "run",
    "nodes",
    "requests",
    "good",
    "good/s",
    "rejected",
    "TTFT mean",
    "TTFT p90",
    "TBT mean",
    "TBT p90",
    "hit rate",
    "prefill util",
    "decode util",
)


def row(summary: Summary) -> tuple[str, ...]:
    """Under COLUMNS, as text."""
    return (
        summary.name,
        str(summary.num_nodes),
        str(summary.num_requests),
        f"{summary.good_share:.1%}",
        f"{summary.goodput_rps:.3f}",
        str(summary.rejected_requests),
        f"{summary.ttft_ms.mean / 1e3:.2f} s",
        f"{summary.ttft_ms.p90 / 1e3:.2f} s",
        f"{summary.tbt_ms.mean:.0f} ms",
        f"{summary.tbt_ms.p90:.0f} ms",
        f"{summary.hit_rate_tokens:.1%}",
        f"{summary.prefill_utilisation:.0%}",
        f"{summary.decode_utilisation:.0%}",
    )


def figures_of(results: Sequence[Result], hit_rates: Sequence[HitRate] = ()) -> Figures:
    """The plots that fit what was run."""
    first = results[0].config.slo
    found: Figures = {
        "ttft_cdf": plots.cdf(results, "ttft_ms", "Time to first token", first.ttft_ms, 1e3, "s"),
        "tbt_cdf": plots.cdf(results, "tbt_ms", "Time between tokens", first.tbt_ms, 1.0, "ms"),
    }
    names = [result.config.label for result in results]
    good = [100 * result.summary.good_share for result in results]
    found["good"] = plots.bars(names, {"good": good}, "Requests within both SLOs", "% of all requests")
    reasons = sorted({reason for result in results for reason in result.summary.rejected_by_reason})
    if reasons:
        parts = {
            reason: [float(result.summary.rejected_by_reason.get(reason, 0)) for result in results]
            for reason in reasons
        }
        found["rejected"] = plots.bars(names, parts, "Requests refused, by reason", "requests")
    if hit_rates:
        curves: dict[str, tuple[list[float], list[float]]] = {}
        for rate in hit_rates:
            xs, ys = curves.setdefault(rate.eviction_policy, ([], []))
            xs.append(rate.capacity_blocks)
            ys.append(rate.of_blocks)
        found["hit_rate"] = plots.lines(
            curves, "Hit rate of one cache by capacity", "blocks", "hit rate", is_log=True
        )
    for number, result in enumerate(results[: plots.MAX_LINES]):
        if result.series.at:
            found[f"load_{number}"] = plots.load_over_time(result)
        if any(any(counts) for counts in result.series.hot_replicas):
            found[f"replicas_{number}"] = plots.replica_heat(result)
    return found


def write_report(
    directory: Path, title: str, results: Sequence[Result], hit_rates: Sequence[HitRate] = ()
) -> Path:
    """report.html (nothing outside it is needed), results.json and one PNG a plot. Returns the page."""
    directory.mkdir(parents=True, exist_ok=True)
    figures = figures_of(results, hit_rates)
    for stem, content in figures.items():
        (directory / f"{stem}.png").write_bytes(content)
    document = {
        "title": title,
        "runs": [{"config": r.config, "summary": r.summary, "load": r.series} for r in results],
        "hit_rates": list(hit_rates),
    }
    (directory / "results.json").write_bytes(msgspec.json.format(msgspec.json.encode(document)) + b"\n")
    page = directory / "report.html"
    page.write_text(html_page(title, results, figures), encoding="utf-8")
    return page


def write_figure(directory: Path, figure: Figure) -> None:
    """NAME.json and its PNGs."""
    directory.mkdir(parents=True, exist_ok=True)
    for stem, content in figure.plots.items():
        (directory / f"{stem}.png").write_bytes(content)
    document = msgspec.json.encode(msgspec.structs.replace(figure, plots={}))
    (directory / f"{figure.name}.json").write_bytes(msgspec.json.format(document) + b"\n")


def html_page(title: str, results: Sequence[Result], figures: Figures) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in COLUMNS)
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row(result.summary)) + "</tr>"
        for result in results
    )
    images = "".join(
        f'<p><img alt="{stem}" src="data:image/png;base64,{base64.b64encode(content).decode()}"></p>'
        for stem, content in figures.items()
    )
    configs = "".join(
        f"<details><summary>{html.escape(result.config.label)}</summary><pre>"
        f"{html.escape(msgspec.json.format(msgspec.json.encode(result.config)).decode())}</pre></details>"
        for result in results
    )
    slo = results[0].config.slo
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{html.escape(title)}</h1>"
        f"<p>Good: TTFT within {slo.ttft_ms / 1e3:g} s and TBT (mean of the longest tenth of a request's "
        f"intervals) within {slo.tbt_ms:g} ms. Trace {html.escape(results[0].summary.trace)}.</p>"
        f"<table><tr>{head}</tr>{rows}</table>{images}<h2>Configurations</h2>{configs}</body></html>\n"
    )
