"""Whole runs: nothing lost, repeatable, and the effects the paper reports."""

from pathlib import Path

import msgspec
import pytest

from kvcore.errors import ConfigError
from kvsim.cluster import Cluster
from kvsim.config import ClusterSpec, SimConfig, Slo, TraceSpec
from kvsim.engine_model import EngineSpec
from kvsim.metrics import Summary, good_share
from kvsim.runs import load_trace, simulate, simulate_many
from kvsim.workload import Synthetic
from router.core.admission import ADMISSIONS
from router.core.policies import POLICIES
from router.core.settings import Settings

HEAD = str(Path(__file__).parents[2] / "data" / "synthetic_trace_head.jsonl")
BASE = SimConfig(trace=TraceSpec(path=HEAD), engine=EngineSpec(prefill_efficiency=0.4))
replace = msgspec.structs.replace


def on(config: SimConfig, **changes: object) -> SimConfig:
    return replace(config, cluster=replace(config.cluster, **changes))


def summary(config: SimConfig) -> Summary:
    return simulate(config).summary


COUPLED = on(replace(BASE, prefill_policy="least_loaded"), kind="coupled")


@pytest.mark.parametrize(
    "config",
    [
        BASE,
        on(BASE, cache_scope="none"),
        on(BASE, cache_scope="node"),
        on(BASE, cache_scope="global"),
        on(BASE, dram_bytes=64 << 30, ssd_bytes=1 << 40),
        on(BASE, prefill_group_nodes=4),
        on(BASE, layerwise=False),
        on(replace(BASE, prefill_policy="elastic"), prefill_nodes=2, decode_chunk_tokens=512),
        COUPLED,
        on(COUPLED, coupled_prefix_caching=False),
        on(COUPLED, coupled_chunk_tokens=2048),
    ],
)
def test_every_request_ends_and_none_is_lost(config: SimConfig) -> None:
    cluster = Cluster(config, load_trace(config))
    cluster.run()
    assert [o.number for o in cluster.outcomes] == list(range(500))
    assert all(o.ttft_ms > 0 and o.ended_at > o.arrived_at for o in cluster.outcomes)
    assert all(o.tbt_ms >= o.mean_tbt_ms * 0.999 > 0 for o in cluster.outcomes if o.output_tokens > 1)
    assert all(o.hit_tokens < o.prompt_tokens for o in cluster.outcomes)
    assert cluster.book.num_requests == 0
    assert all(len(node.batch) == 0 and node.kv_share == 0 for node in cluster.decode.values())


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_of_the_router_runs(policy: str) -> None:
    config = replace(BASE, prefill_policy=policy, trace=TraceSpec(path=HEAD, end_s=20.0))
    assert summary(config).served_requests == summary(config).num_requests > 0


@pytest.mark.parametrize("admission", sorted(ADMISSIONS))
def test_served_and_rejected_make_all_under_every_admission(admission: str) -> None:
    config = replace(
        BASE,
        trace=TraceSpec(path=HEAD, speed=4.0),
        slo=Slo(ttft_ms=5000.0),
        scheduling=Settings(admission=admission),
    )
    result = summary(on(config, prefill_nodes=4, decode_nodes=2))
    assert result.served_requests + result.rejected_requests == 500
    assert sum(result.rejected_by_reason.values()) == result.rejected_requests
    assert (result.rejected_requests == 0) == (admission == "none")


def test_a_run_can_be_repeated_and_processes_change_nothing() -> None:
    configs = [replace(BASE, prefill_policy=name, seed=7) for name in ("random", "global_cache_aware")]
    ended: list[str] = []
    parallel = simulate_many(configs, 2, lambda config: ended.append(config.prefill_policy))
    alone = simulate_many(configs, 1)
    assert [r.summary for r in parallel] == [r.summary for r in alone]
    assert [r.outcomes for r in parallel] == [r.outcomes for r in alone]
    assert sorted(ended) == ["global_cache_aware", "random"]
    assert summary(replace(configs[0], seed=8)) != alone[0].summary


def test_without_load_the_ttft_is_the_prefill_and_equals_the_routers_prediction() -> None:
    config = replace(
        BASE,
        trace=TraceSpec(),
        synthetic=Synthetic(num_requests=20, requests_per_s=0.01, prefix_ratio=0.0),
    )
    model = config.engine.prefill_model()
    for outcome in simulate(config).outcomes:
        assert outcome.ttft_ms == pytest.approx(model.compute_ms(outcome.prompt_tokens, 0), rel=1e-6)
        assert outcome.predicted_ttft_ms == pytest.approx(outcome.ttft_ms, rel=1e-6)


def test_the_cache_scopes_come_in_the_order_of_what_they_can_reach() -> None:
    by_scope = {
        scope: summary(on(BASE, cache_scope=scope)).hit_rate_tokens
        for scope in ("none", "node", "pool", "global")
    }
    assert by_scope["none"] == 0.0 < by_scope["node"] <= by_scope["pool"]
    assert by_scope["global"] >= by_scope["pool"] - 0.01


def test_prefills_disturb_decoding_where_both_share_a_node() -> None:
    """The reason for disaggregation: at a tight TBT the coupled nodes fail most, chunking helps them."""
    slo_ms = (30_000.0, 100.0)
    whole = good_share(simulate(COUPLED).outcomes, *slo_ms)
    chunked = good_share(simulate(on(COUPLED, coupled_chunk_tokens=512)).outcomes, *slo_ms)
    apart = good_share(simulate(BASE).outcomes, *slo_ms)
    assert whole < chunked and whole < apart


def test_a_slow_network_is_felt() -> None:
    fast = summary(BASE)
    slow = summary(replace(BASE, engine=replace(BASE.engine, nic_bytes_per_s=1e9)))
    # The decode side answers: the first token waits for the KV, those after it do not.
    assert slow.ttft_ms.mean > 1.5 * fast.ttft_ms.mean and slow.tbt_ms.mean < 1.5 * fast.tbt_ms.mean


def test_the_first_token_can_be_counted_where_it_is_computed() -> None:
    """The wait for KV and room is in TTFT or in the first interval, never in both or in neither."""
    slow = replace(BASE, engine=replace(BASE.engine, nic_bytes_per_s=1e9))
    outcomes = simulate(slow).outcomes
    waited = [o for o in outcomes if o.handover_ms > 1.0]
    assert len(waited) > 100
    for o in waited:
        if 1 < o.output_tokens <= 11:  # a tenth of its intervals: the longest alone
            assert o.tbt_at_prefill_ms == pytest.approx(max(o.tbt_ms, o.handover_ms + o.tbt_ms), rel=0.2)
        if o.output_tokens > 1:
            assert o.tbt_at_prefill_ms > o.tbt_ms
    # So slow a network costs TTFT when the decode side answers, and TBT when the prefill side does.
    short = [replace(o, tbt_ms=0.0) for o in waited]
    assert good_share(short, 30_000.0, 200.0) > 0.5 > good_share(short, 30_000.0, 200.0, at_prefill=True)
    coupled = simulate(COUPLED).outcomes
    assert all(o.handover_ms == 0.0 and o.tbt_at_prefill_ms == o.tbt_ms for o in coupled)


def test_layer_wise_transfer_hides_the_network() -> None:
    narrow = replace(BASE, engine=replace(BASE.engine, nic_bytes_per_s=5e9))
    assert summary(narrow).ttft_ms.mean < summary(on(narrow, layerwise=False)).ttft_ms.mean


def test_elastic_decode_nodes_take_over_what_prefill_nodes_cannot() -> None:
    overloaded = on(replace(BASE, trace=TraceSpec(path=HEAD, speed=2.0)), prefill_nodes=4, decode_nodes=4)
    elastic = on(replace(overloaded, prefill_policy="elastic"), decode_chunk_tokens=512)
    assert summary(elastic).ttft_ms.mean < 0.8 * summary(overloaded).ttft_ms.mean
    with pytest.raises(ConfigError, match="decode_chunk_tokens needs kind = disaggregated"):
        ClusterSpec(decode_chunk_tokens=512, cache_scope="node")


def test_held_requests_are_served_when_the_burst_is_over_and_their_ttft_counts_from_arrival() -> None:
    refused = on(
        replace(
            BASE,
            trace=TraceSpec(path=HEAD, speed=3.0),
            slo=Slo(ttft_ms=20_000.0),
            scheduling=Settings(admission="priced"),
        ),
        prefill_nodes=6,
    )
    held = simulate(replace(refused, scheduling=Settings(admission="priced", hold_ms=2000.0)))
    assert 0 < held.summary.rejected_requests < summary(refused).rejected_requests
    late = [o for o in held.outcomes if o.is_served and o.ttft_ms - o.predicted_ttft_ms > 1900.0]
    assert late and held.summary.ttft_ms.max < 25_000.0
    assert held.summary.served_requests + held.summary.rejected_requests == 500


def test_bad_configurations_say_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"either trace\.path or a \[synthetic\] table"):
        simulate(SimConfig())
    with pytest.raises(ConfigError, match="cannot be divided into groups of 3"):
        ClusterSpec(prefill_group_nodes=3)
    with pytest.raises(ConfigError, match="no routing policy 'best'"):
        simulate(replace(BASE, prefill_policy="best"))
    with pytest.raises(ConfigError, match="no eviction policy 'fifo'"):
        simulate(on(BASE, eviction_policy="fifo"))
