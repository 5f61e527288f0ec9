"""Plots of results, as PNG bytes. Drawn with matplotlib's object interface: no global state, no display."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from kvsim.runs import Result

MAX_LINES = 10


def png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    FigureCanvasAgg(figure)
    figure.savefig(buffer, format="png", dpi=110, bbox_inches="tight", metadata={"Software": None})
    return buffer.getvalue()


def axes(title: str, x: str, y: str, width: float = 6.4) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, 3.8))
    plot = figure.add_subplot()
    plot.set_title(title, fontsize=11)
    plot.set_xlabel(x)
    plot.set_ylabel(y)
    plot.grid(alpha=0.3)
    return figure, plot


def cdf(results: Sequence[Result], field: str, title: str, slo: float, unit_ms: float, unit: str) -> bytes:
    """Cumulative distribution of one field of the outcomes served."""
    figure, plot = axes(title, f"{field.removesuffix('_ms').upper()} ({unit})", "share of requests served")
    for result in results[:MAX_LINES]:
        values = np.sort([getattr(o, field) for o in result.outcomes if o.is_served]) / unit_ms
        if len(values):
            plot.plot(values, np.arange(1, len(values) + 1) / len(values), label=result.config.label)
    plot.axvline(slo / unit_ms, color="black", linestyle=":", label="SLO")
    plot.set_xscale("log")
    plot.set_ylim(0, 1.01)
    plot.legend(fontsize=7)
    return png(figure)


def load_over_time(result: Result) -> bytes:
    figure, plot = axes(f"Load over time: {result.config.label}", "seconds", "load / SLO", 9.0)
    series = result.series
    plot.plot(series.at, series.prefill_load, label="prefill (queue / TTFT SLO)", linewidth=0.9)
    plot.plot(series.at, series.decode_load, label="decode (step / TBT SLO)", linewidth=0.9)
    plot.plot(series.at, series.kv_share, label="decode memory reserved", linewidth=0.7, alpha=0.6)
    plot.legend(fontsize=8)
    return png(figure)


def replica_heat(result: Result) -> bytes:
    figure, plot = axes(
        f"Copies of the hottest blocks: {result.config.label}", "seconds", "block, hottest first", 9.0
    )
    counts = np.array(result.series.hot_replicas).T
    at = result.series.at
    image = plot.imshow(counts, aspect="auto", interpolation="nearest", extent=(0, at[-1], len(counts), 0))
    figure.colorbar(image, ax=plot, label="nodes that hold it")
    plot.grid(False)
    return png(figure)


def bars(names: Sequence[str], parts: Mapping[str, Sequence[float]], title: str, y: str) -> bytes:
    """Stacked, one bar a name."""
    figure, plot = axes(title, "", y, max(6.4, 0.7 * len(names) + 2))
    bottom = np.zeros(len(names))
    for label, values in parts.items():
        plot.bar(range(len(names)), values, bottom=bottom, label=label)
        bottom += np.array(values)
    plot.set_xticks(range(len(names)), names, rotation=30, ha="right", fontsize=8)
    if len(parts) > 1:
        plot.legend(fontsize=8)
    return png(figure)


def lines(
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    title: str,
    x: str,
    y: str,
    is_log: bool = False,
) -> bytes:
    figure, plot = axes(title, x, y)
    for label, (xs, ys) in curves.items():
        plot.plot(xs, ys, marker="o", markersize=3, label=label)
    if is_log:
        plot.set_xscale("log")
    plot.set_ylim(bottom=0)
    plot.legend(fontsize=8)
    return png(figure)
