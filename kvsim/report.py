"""Results for people and for programs: a self-contained HTML page, PNG files, JSON."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvcore.errors import ConfigError
from kvsim import plots
from kvsim.hit_rate import HitRate
from kvsim.metrics import Summary
from kvsim.paper.base import Figure
from kvsim.runs import Result

_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 1150px; padding: 0 1em }
table { border-collapse: collapse; margin: 1em 0; font-variant-numeric: tabular-nums }
th, td { padding: .25em .6em; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap }
th:first-child, td:first-child { text-align: left; white-space: normal }
.wide { overflow-x: auto } figure { margin: 0; max-width: 1000px } figure img { width: 100% }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(460px, 100%), 1fr)); gap: 1.5em }
.plots .over-time { grid-column: 1 / -1 } .over-time img { width: auto; max-width: 100% }
figcaption, .notes { color: #555 }
dt { font-weight: 600; float: left; margin-right: .5em } dd { margin: 0 0 .2em }
details { margin: .5em 0 } pre { background: #f6f6f6; padding: 1em; overflow: auto }
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
    "prefill busy",
    "decode busy",
)
_NOTES = (
    ("good", "share of all requests, refused ones included, that kept both SLOs"),
    ("good/s", "good requests by the time in which requests arrived"),
    ("TTFT", "arrival to first token, of requests served; it contains the wait for the decode batch"),
    ("TBT", "of a request, the mean of the longest tenth of its intervals between tokens"),
    ("hit rate", "share of prompt tokens, of requests served, that needed not be computed"),
    ("busy", "share of the run in which a node of the pool computed; coupled nodes are under decode"),
)


class Picture(msgspec.Struct, frozen=True):
    png: bytes
    caption: str
    is_over_time: bool = False  # as wide as the page


def row(summary: Summary) -> tuple[str, ...]:
    """Under COLUMNS, as text."""
    return (
        summary.name,
        str(summary.num_nodes),
        f"{summary.num_requests:,}",
        f"{summary.good_share:.1%}",
        f"{summary.goodput_rps:.3g}",
        f"{summary.rejected_requests:,}",
        f"{summary.ttft_ms.mean / 1e3:.2f} s",
        f"{summary.ttft_ms.p90 / 1e3:.2f} s",
        f"{summary.tbt_ms.mean:.0f} ms",
        f"{summary.tbt_ms.p90:.0f} ms",
        f"{summary.hit_rate_tokens:.1%}",
        f"{summary.prefill_utilisation:.0%}" if summary.prefill_utilisation else "-",
        f"{summary.decode_utilisation:.0%}",
    )


def pictures(results: Sequence[Result], hit_rates: Sequence[HitRate] = ()) -> dict[str, Picture]:
    """The plots that fit what was run, by file stem."""
    first = results[0].config.slo
    ttft = plots.cdf(results, "ttft_ms", "Time to first token", first.ttft_ms, 1e3, "s")
    tbt = plots.cdf(results, "tbt_ms", "Time between tokens", first.tbt_ms, 1.0, "ms")
    left_out = len(results) - plots.MAX_LINES
    more = f" The last {left_out} runs of the table are left out." if left_out > 0 else ""
    found = {
        "ttft_cdf": Picture(ttft, f"Share of requests with at most so much TTFT.{more}"),
        "tbt_cdf": Picture(tbt, f"Share of requests with at most so much TBT.{more}"),
    }
    names = [result.config.label for result in results]
    if len(results) > 1:
        good = [100 * result.summary.good_share for result in results]
        drawn = plots.bars(names, {"": good}, "Requests within both SLOs", "% of all requests")
        found["good"] = Picture(drawn, "Refused requests count as not good.")
    reasons = sorted({reason for result in results for reason in result.summary.rejected_by_reason})
    if reasons:
        parts = {
            reason: [float(result.summary.rejected_by_reason.get(reason, 0)) for result in results]
            for reason in reasons
        }
        drawn = plots.bars(names, parts, "Requests refused, by reason", "requests")
        found["rejected"] = Picture(drawn, "Reasons are those the router answers with its 429.")
    if hit_rates:
        caption = "One LRU cache that sees all requests of the trace; no cluster is simulated for this one."
        found["hit_rate"] = Picture(
            _by_capacity(hit_rates, results[0].config.trace.block_size_tokens), caption
        )
    for number, result in enumerate(results[: plots.MAX_LINES]):
        if result.series.at:
            caption = (
                "Prefill: the mean queue before a new prompt by the TTFT SLO. Decode: the mean time of a "
                "step by the TBT SLO. Memory: the share of the decode nodes' KV memory that is reserved."
            )
            found[f"load_{number}"] = Picture(plots.load_over_time(result), caption, True)
        if any(any(counts) for counts in result.series.hot_replicas):
            caption = "The 100 blocks with the most uses, the most used on top: on how many nodes each lies."
            found[f"replicas_{number}"] = Picture(plots.replica_heat(result), caption, True)
    return found


def _by_capacity(hit_rates: Sequence[HitRate], block_size_tokens: int) -> bytes:
    curves: dict[str, tuple[list[float], list[float]]] = {}
    for rate in hit_rates:
        xs, ys = curves.setdefault(rate.eviction_policy, ([], []))
        xs.append(rate.capacity_blocks)
        ys.append(rate.of_blocks)
    x = f"capacity (blocks of {block_size_tokens} tokens)"
    return plots.lines(curves, "Hit rate of one cache by capacity", x, "hit rate (of blocks)", is_log=True)


def make_directory(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {directory}: no such directory can be made: {error.strerror}") from error


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error


def _write_json(path: Path, document: object) -> None:
    _write(path, msgspec.json.format(msgspec.json.encode(document)) + b"\n")


def write_report(
    directory: Path, title: str, results: Sequence[Result], hit_rates: Sequence[HitRate] = ()
) -> Path:
    """report.html (nothing outside it is needed), results.json and one PNG a plot. Returns the page."""
    make_directory(directory)
    found = pictures(results, hit_rates)
    for stem, picture in found.items():
        _write(directory / f"{stem}.png", picture.png)
    runs = [{"config": r.config, "summary": r.summary, "load": r.series} for r in results]
    _write_json(directory / "results.json", {"title": title, "runs": runs, "hit_rates": list(hit_rates)})
    page = directory / "report.html"
    _write(page, html_page(title, results, found).encode())
    return page


def write_hit_rates(directory: Path, trace: str, rates: Sequence[HitRate], block_size_tokens: int) -> None:
    """hit_rates.json and hit_rate.png."""
    make_directory(directory)
    _write(directory / "hit_rate.png", _by_capacity(rates, block_size_tokens))
    _write_json(directory / "hit_rates.json", {"trace": trace, "hit_rates": list(rates)})


def write_figure(directory: Path, figure: Figure) -> None:
    """NAME.json and its PNGs."""
    make_directory(directory)
    for stem, content in figure.plots.items():
        _write(directory / f"{stem}.png", content)
    _write_json(directory / f"{figure.name}.json", msgspec.structs.replace(figure, plots={}))


def _figure(stem: str, picture: Picture) -> str:
    place = " class=over-time" if picture.is_over_time else ""
    data = base64.b64encode(picture.png).decode()
    return (
        f'<figure{place}><img alt="{stem}" src="data:image/png;base64,{data}">'
        f"<figcaption>{html.escape(picture.caption)}</figcaption></figure>"
    )


def html_page(title: str, results: Sequence[Result], found: dict[str, Picture]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in COLUMNS)
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row(result.summary)) + "</tr>"
        for result in results
    )
    images = "".join(_figure(stem, picture) for stem, picture in found.items())
    configs = "".join(
        f"<details><summary>{html.escape(result.config.label)}</summary><pre>"
        f"{html.escape(msgspec.json.format(msgspec.json.encode(result.config)).decode())}</pre></details>"
        for result in results
    )
    notes = "".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(text)}</dd>" for name, text in _NOTES)
    slo, trace = results[0].config.slo, results[0].summary.trace
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>'
        f"<body><h1>{html.escape(title)}</h1>"
        f"<p>Trace {html.escape(trace)}. SLO: TTFT {slo.ttft_ms / 1e3:g} s, TBT {slo.tbt_ms:g} ms.</p>"
        f'<div class="wide"><table><tr>{head}</tr>{rows}</table></div><dl class="notes">{notes}</dl>'
        f'<h2>Plots</h2><div class="plots">{images}</div><h2>Configurations</h2>{configs}</body></html>\n'
    )
