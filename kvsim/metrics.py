"""What a run is judged by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvsim.job import Outcome


class Distribution(msgspec.Struct, frozen=True):
    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    max: float = 0.0

    @staticmethod
    def of(values: Sequence[float] | NDArray[np.float64]) -> Distribution:
        """Zeros when there are none."""
        if not len(values):
            return Distribution()
        array = np.asarray(values, dtype=float)
        p50, p90, p99 = (float(p) for p in np.percentile(array, (50, 90, 99)))
        return Distribution(float(array.mean()), p50, p90, p99, float(array.max()))


class LoadSeries(msgspec.Struct):
    """Samples over time. `prefill_load` is the mean queue in front of a new prompt / TTFT SLO, `decode_load`
    the mean time of a decode step / TBT SLO; both are loads as the paper defines them. `kv_share` is the
    share of decode memory that is reserved. `hot_replicas`: copies of the blocks used most, hottest first."""

    at: list[float] = []
    prefill_load: list[float] = []
    decode_load: list[float] = []
    kv_share: list[float] = []
    waiting_requests: list[int] = []
    hot_replicas: list[list[int]] = []


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """`good_*`: requests within both SLOs; `good_share_at_prefill` counts the first token at the end of its
    prefill. Shares are of all requests that arrived; `goodput_rps` is over the time in which they did.
    `handover_ms` is of requests that another node prefilled; `prefill_ms` is compute time a request served.
    Deviations and `load_correlation`, that of prefill and decode load, are of the time in which requests
    arrive; below 0 the loads swing in antiphase (arXiv 2407.00079, section 7.3). Utilisations are of the time
    until the last request ended.
    """

    name: str
    trace: str
    num_requests: int
    served_requests: int
    rejected_requests: int
    rejected_by_reason: dict[str, int]
    wasted_prefills: int
    good_requests: int
    good_share: float
    good_share_at_prefill: float
    goodput_rps: float
    good_tokens: int
    ttft_ms: Distribution
    tbt_ms: Distribution
    handover_ms: Distribution
    prefill_ms: Distribution
    hit_rate_tokens: float
    hit_rate_blocks: float
    transferred_bytes: float
    prefill_utilisation: float
    decode_utilisation: float
    prefill_load_std: float
    decode_load_std: float
    load_correlation: float
    duration_s: float
    num_nodes: int


def good_share(
    outcomes: Sequence[Outcome], ttft_slo_ms: float, tbt_slo_ms: float, at_prefill: bool = False
) -> float:
    """The paper's effective request capacity: the share of requests that arrived and kept both SLOs.
    `at_prefill`: with the first token counted at the end of its prefill."""
    if not outcomes:
        return 0.0
    return sum(o.is_good(ttft_slo_ms, tbt_slo_ms, at_prefill) for o in outcomes) / len(outcomes)


def summarize(
    name: str,
    trace: str,
    outcomes: Sequence[Outcome],
    series: LoadSeries,
    *,
    ttft_slo_ms: float,
    tbt_slo_ms: float,
    transferred_bytes: float,
    prefill_utilisation: float,
    decode_utilisation: float,
    duration_s: float,
    num_nodes: int,
) -> Summary:
    served = [o for o in outcomes if o.is_served]
    good = [o for o in served if o.is_good(ttft_slo_ms, tbt_slo_ms)]
    arrivals_s = outcomes[-1].arrived_at - outcomes[0].arrived_at if outcomes else 0.0
    prompt_tokens = sum(o.prompt_tokens for o in served)
    blocks = sum(o.num_blocks for o in served)
    # Not while the last requests run out: that is a slope, and no swing.
    arriving = sum(at <= outcomes[-1].arrived_at for at in series.at) if outcomes else 0
    prefill, decode = np.array(series.prefill_load[:arriving]), np.array(series.decode_load[:arriving])
    swings = len(prefill) > 1 and prefill.std() > 0 and decode.std() > 0
    return Summary(
        name=name,
        trace=trace,
        num_requests=len(outcomes),
        served_requests=len(served),
        rejected_requests=len(outcomes) - len(served),
        rejected_by_reason=dict(
            sorted(Counter(o.reject_reason for o in outcomes if not o.is_served).items())
        ),
        wasted_prefills=sum(o.wasted_prefill for o in outcomes),
        good_requests=len(good),
        good_share=len(good) / len(outcomes) if outcomes else 0.0,
        good_share_at_prefill=good_share(outcomes, ttft_slo_ms, tbt_slo_ms, at_prefill=True),
        # Requests that all come at once have only their ends.
        goodput_rps=len(good) / (arrivals_s or duration_s),
        good_tokens=sum(o.prompt_tokens + o.output_tokens for o in good),
        ttft_ms=Distribution.of([o.ttft_ms for o in served]),
        tbt_ms=Distribution.of([o.tbt_ms for o in served if o.output_tokens > 1]),
        handover_ms=Distribution.of([o.handover_ms for o in served if o.handover_ms]),
        prefill_ms=Distribution.of([o.prefill_ms for o in served]),
        hit_rate_tokens=sum(o.hit_tokens for o in served) / prompt_tokens if prompt_tokens else 0.0,
        hit_rate_blocks=sum(o.hit_blocks for o in served) / blocks if blocks else 0.0,
        transferred_bytes=transferred_bytes,
        prefill_utilisation=prefill_utilisation,
        decode_utilisation=decode_utilisation,
        prefill_load_std=float(prefill.std()) if len(prefill) else 0.0,
        decode_load_std=float(decode.std()) if len(decode) else 0.0,
        load_correlation=float(np.corrcoef(prefill, decode)[0, 1]) if swings else 0.0,
        duration_s=duration_s,
        num_nodes=num_nodes,
    )
