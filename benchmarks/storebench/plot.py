"""The figures as one picture: latency of one client and aggregate rate of many, over the value size."""

from collections.abc import Sequence
from pathlib import Path

from storebench.plan import MANY_CLIENTS
from storebench.report import size_text
from storebench.stats import Figure


def save_plot(figures: Sequence[Figure], path: Path) -> None:
    """PNG (or what the suffix says). Needs matplotlib, from the `bench` extra."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    picture, axes = pyplot.subplots(2, 2, figsize=(13, 9), layout="constrained")
    for column, op in enumerate(("put", "get")):
        for row, num_clients in enumerate((1, MANY_CLIENTS)):
            axis = axes[row][column]
            clients = "one client" if num_clients == 1 else f"{num_clients} clients together"
            axis.set_title(f"{op}, {clients}")
            axis.set_xlabel("size of a value")
            axis.set_ylabel("GB/s (higher is better)")
            axis.set_xscale("log", base=2)
            chosen = [f for f in figures if f.op == op and f.num_keys == 1 and f.num_clients == num_clients]
            for system in dict.fromkeys(figure.system for figure in chosen):
                line = [f for f in chosen if f.system == system]
                axis.plot(
                    [f.size_bytes for f in line],
                    # One client: the rate of the typical call; a rare slow one must not bend the line.
                    [f.size_bytes / f.p50_us / 1e3 if num_clients == 1 else f.gb_per_s for f in line],
                    marker="o",
                    linewidth=2.5 if system.startswith("ours") else 1.2,
                    linestyle="--" if system in ("memcpy", "raw-tcp") else "-",
                    label=system,
                )
            sizes = sorted({figure.size_bytes for figure in chosen})
            axis.set_xticks(sizes, [size_text(size) for size in sizes])
            axis.set_yscale("log")
            axis.grid(alpha=0.3, which="both")
            axis.legend(fontsize=8)
    picture.savefig(path, dpi=110)
    pyplot.close(picture)
