"""Figures 13 and 15 (FAST '25): network bandwidth, and how many nodes should prefill."""

from __future__ import annotations

from kvsim import plots
from kvsim.config import ClusterSpec, SimConfig
from kvsim.engine_model import EngineSpec
from kvsim.metrics import good_share
from kvsim.paper.base import Claim, Figure, Many, Row, Traces, percent, seconds

GBPS = (10, 25, 50, 100, 200, 400)
PREFILL_NODES = (4, 6, 7, 8, 9, 10, 12)
TBT_SLO_MS = 100.0


def bandwidth(traces: Traces, many: Many) -> Figure:
    results = many(
        [
            SimConfig(
                name=f"{gbps} Gbps",
                seed=1,
                trace=traces.spec("synthetic"),
                engine=EngineSpec(nic_bytes_per_s=gbps * 1e9 / 8),
                cluster=ClusterSpec(cache_scope="global"),
                prefill_policy="least_loaded",
            )
            for gbps in GBPS
        ]
    )
    ttft = {gbps: r.summary.ttft_ms.mean for gbps, r in zip(GBPS, results, strict=True)}
    tbt = {gbps: r.summary.tbt_ms.mean for gbps, r in zip(GBPS, results, strict=True)}
    rows = [Row(f"{g} Gbps: mean TTFT", "", seconds(v)) for g, v in ttft.items()]
    rows += [Row(f"{g} Gbps: mean TBT", "", f"{v:.0f} ms") for g, v in tbt.items()]
    curve = {"mean TTFT": (list(GBPS), [v / 1e3 for v in ttft.values()])}

    def saved(low: int, high: int) -> str:
        return f"{100 * (1 - ttft[high] / ttft[low]):.0f} %"

    return Figure(
        "bandwidth",
        "Figure 13: network bandwidth, synthetic, 8P+8D, global cache",
        rows,
        [
            Claim("below 100 Gbps TTFT suffers (25 Gbps: at least 1.2 times)", ttft[25] > 1.2 * ttft[100]),
            Claim(
                "the knee: from 50 to 100 Gbps twice as much is gained as from 100 to 400",
                ttft[50] - ttft[100] > 2 * (ttft[100] - ttft[400]),
            ),
        ],
        f"The knee is where the paper has it, but not as sharp: from 50 to 100 Gbps {saved(50, 100)} are "
        f"gained, from 100 to 200 still {saved(100, 200)}. Our TTFT contains the wait for KV at the decode "
        "node, and one card moves all: cached prefixes to the prefill nodes, new blocks to the store, all KV "
        "to the decode nodes.",
        {
            "figure13": plots.lines(
                curve, "Figure 13: TTFT by bandwidth", "network (Gbps a node)", "mean TTFT (s)", True, True
            )
        },
    )


def ratio(traces: Traces, many: Many) -> Figure:
    results = many(
        [
            SimConfig(
                name=f"{prefill}P+{16 - prefill}D",
                seed=1,
                trace=traces.spec("conversation", speed=1.5),
                cluster=ClusterSpec(prefill_nodes=prefill, decode_nodes=16 - prefill),
            )
            for prefill in PREFILL_NODES
        ]
    )
    shares = {r.config.name: good_share(r.outcomes, 30_000.0, TBT_SLO_MS) for r in results}
    rows = []
    for result in results:
        s = result.summary
        rows.append(
            Row(
                f"{s.name}: within both SLOs / mean TTFT / mean TBT",
                "",
                f"{percent(shares[s.name])} / {seconds(s.ttft_ms.mean)} / {s.tbt_ms.mean:.0f} ms",
            )
        )
    best = max(shares, key=lambda name: shares[name])
    rows.append(Row("best division", "near 1:1", best))
    ttft = [r.summary.ttft_ms.mean / 1e3 for r in results]
    measures = (
        ("within both SLOs (%)", [100 * v for v in shares.values()]),
        ("mean TTFT (s)", ttft),
        ("mean TBT (ms)", [r.summary.tbt_ms.mean for r in results]),
    )
    parts: list[tuple[str, plots.Curves]] = [
        (y, {"": (list(PREFILL_NODES), values)}) for y, values in measures
    ]
    return Figure(
        "ratio",
        "Figure 15: how many of 16 nodes prefill, conversation at 1.5 times its rate, TTFT 30 s, TBT 100 ms",
        rows,
        [
            Claim("best between 7P+9D and 9P+7D", best in ("7P+9D", "8P+8D", "9P+7D")),
            # With 12 prefill nodes requests wait for the four that decode.
            Claim(
                "more prefill nodes: lower TTFT (up to 10P+6D)", ttft[:-1] == sorted(ttft[:-1], reverse=True)
            ),
        ],
        "The best division depends on how fast decoding is, which our default kv_read_efficiency sets (docs/"
        "kvsim.md). At the trace's own rate every division from 6P to 10P keeps nearly all requests within "
        "the SLO, so the figure is drawn at 1.5 times.",
        {"figure15": plots.panels(parts, "Figure 15: how many of 16 nodes prefill", "prefill nodes of 16")},
    )
