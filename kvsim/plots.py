"""Plots of results, as PNG bytes. Drawn with matplotlib's object interface: no global state, no display."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from kvsim.runs import Result

MAX_LINES = 10
MAX_POINTS = 1000  # of a curve

Curves = Mapping[str, tuple[Sequence[float], Sequence[float]]]  # xs and ys by label


def png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    FigureCanvasAgg(figure)
    figure.savefig(buffer, format="png", dpi=110, bbox_inches="tight", metadata={"Software": None})
    return buffer.getvalue()


def axes(title: str, x: str, y: str, width: float = 6.4) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, 3.8))
    plot = figure.add_subplot()
    plot.set_title(title, fontsize=11)
    _dress(plot, x, y)
    return figure, plot


def _dress(plot: Axes, x: str, y: str) -> None:
    plot.set_xlabel(x)
    plot.set_ylabel(y)
    plot.grid(alpha=0.3)


def _plain_log(axis: Axis) -> None:
    """1, 2, 5, 10 and so on in figures people read, for an axis that is logarithmic already."""
    low, high = sorted(axis.get_view_interval())
    subs = (1.0, 2.0, 5.0) if high < 3000 * max(low, 1e-12) else (1.0,)
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(FuncFormatter(lambda value, position: f"{value:,.10g}"))
    axis.set_minor_formatter(NullFormatter())


def _legend_below(figure: Figure, plot: Axes, columns: int) -> None:
    """For curves that leave no room in the plot."""
    figure.set_layout_engine("constrained")
    figure.legend(*plot.get_legend_handles_labels(), fontsize=8, ncols=columns, loc="outside lower center")


def cdf(results: Sequence[Result], field: str, title: str, slo: float, unit_ms: float, unit: str) -> bytes:
    """Cumulative distribution of one field of the outcomes served."""
    figure, plot = axes(title, f"{field.removesuffix('_ms').upper()} ({unit})", "share of requests served")
    for result in results[:MAX_LINES]:
        # An answer of one token has no time between tokens.
        outcomes = [o for o in result.outcomes if o.is_served and (field != "tbt_ms" or o.output_tokens > 1)]
        if outcomes:
            shares = np.linspace(0.0, 1.0, min(len(outcomes), MAX_POINTS))
            values = np.quantile([getattr(o, field) for o in outcomes], shares) / unit_ms
            plot.plot(values, shares, label=result.config.label)
    plot.axvline(slo / unit_ms, color="black", linestyle=":", label="SLO")
    plot.set_xscale("log")
    _plain_log(plot.xaxis)
    plot.set_ylim(0, 1.01)
    _legend_below(figure, plot, 2)
    return png(figure)


def load_over_time(result: Result) -> bytes:
    title = f"Load over time: {result.config.label}"
    figure, plot = axes(title, "time (s)", "1 = all of it used", 9.0)
    series = result.series
    plot.plot(series.at, series.prefill_load, label="prefill: queue / TTFT SLO", linewidth=0.9)
    plot.plot(series.at, series.decode_load, label="decode: step / TBT SLO", linewidth=0.9)
    plot.plot(series.at, series.kv_share, label="decode: memory reserved", linewidth=0.7, alpha=0.6)
    plot.set_ylim(bottom=0)
    _legend_below(figure, plot, 3)
    return png(figure)


def replica_heat(result: Result) -> bytes:
    title = f"Copies of the hottest blocks: {result.config.label}"
    figure, plot = axes(title, "time (s)", "block, by uses in the whole trace", 9.0)
    counts = np.array(result.series.hot_replicas).T
    extent = (0, result.series.at[-1], len(counts), 0)
    image = plot.imshow(counts, aspect="auto", interpolation="nearest", extent=extent, vmin=0)
    figure.colorbar(image, ax=plot, label="nodes that hold it", ticks=MaxNLocator(integer=True))
    plot.grid(False)
    return png(figure)


def bars(
    names: Sequence[str],
    parts: Mapping[str, Sequence[float]],
    title: str,
    y: str,
    is_stacked: bool = True,
    is_log: bool = False,
) -> bytes:
    """One bar a name, its parts on each other; or one bar a part, side by side. Parts by label, maybe ""."""
    figure, plot = axes(title, "", y, min(max(6.4, 0.7 * len(names) + 2), 16.0))
    bottom = np.zeros(len(names))
    width = 0.8 if is_stacked else 0.8 / len(parts)
    for number, (label, values) in enumerate(parts.items()):
        shift = 0.0 if is_stacked else (number - (len(parts) - 1) / 2) * width
        drawn = plot.bar(
            np.arange(len(names)) + shift, values, width, bottom=bottom if is_stacked else None, label=label
        )
        if not is_stacked:
            plot.bar_label(drawn, fmt="{:.3g}", fontsize=7)
        bottom += np.array(values)
    plot.set_xticks(range(len(names)), names, rotation=30, ha="right", rotation_mode="anchor", fontsize=8)
    if is_log:
        plot.set_yscale("log")
        _plain_log(plot.yaxis)
    if any(parts):
        plot.legend(fontsize=8)
    return png(figure)


def lines(curves: Curves, title: str, x: str, y: str, is_log: bool = False, is_log_y: bool = False) -> bytes:
    figure, plot = axes(title, x, y)
    _draw(plot, curves)
    if is_log:
        plot.set_xscale("log")
        _plain_log(plot.xaxis)
    if is_log_y:
        plot.set_yscale("log")
        _plain_log(plot.yaxis)
    else:
        plot.set_ylim(bottom=0)
    return png(figure)


def panels(parts: Sequence[tuple[str, Curves]], title: str, x: str) -> bytes:
    """Quantities of different units above each other, over one x of whole numbers; each with its label."""
    figure = Figure(figsize=(6.4, 1.2 + 1.9 * len(parts)), layout="constrained")
    figure.suptitle(title, fontsize=11)
    for number, (y, curves) in enumerate(parts):
        plot = figure.add_subplot(len(parts), 1, number + 1)
        _dress(plot, x if number == len(parts) - 1 else "", y)
        _draw(plot, curves)
        plot.set_ylim(bottom=0)
        plot.xaxis.set_major_locator(MaxNLocator(integer=True))
    return png(figure)


def _draw(plot: Axes, curves: Curves) -> None:
    for label, (xs, ys) in curves.items():
        plot.plot(xs, ys, marker="o", markersize=3, label=label)
    if len(curves) > 1:
        plot.legend(fontsize=8)
