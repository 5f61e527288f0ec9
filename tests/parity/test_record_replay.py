"""The router's core comes to the same decisions, one by one, when a record of a run is replayed."""

from pathlib import Path

import msgspec
import pytest

from kvcore.errors import ConfigError
from kvsim.cluster import Cluster
from kvsim.config import ClusterSpec, SimConfig, Slo, TraceSpec
from kvsim.engine_model import EngineSpec
from kvsim.recorded import read_lines, recorded_trace, replay, written
from kvsim.runs import load_trace, simulate
from router.core.record import Arrival, Line
from router.core.settings import Settings

HEAD = str(Path(__file__).parents[1] / "data" / "synthetic_trace_head.jsonl")


def record(config: SimConfig) -> tuple[Cluster, list[Line]]:
    lines: list[Line] = []
    cluster = Cluster(config, load_trace(config), record=lines.append)
    cluster.run()
    return cluster, lines


@pytest.mark.parametrize(
    ("policy", "admission", "scope"),
    [
        ("global_cache_aware", "predictive", "pool"),
        ("global_cache_aware", "early", "global"),
        ("cache_aware", "predictive_request", "node"),
        ("random", "baseline", "pool"),
        ("power_of_two", "none", "none"),
        ("elastic", "priced", "pool"),
    ],
)
def test_replayed_decisions_are_the_recorded_ones(
    tmp_path: Path, policy: str, admission: str, scope: str
) -> None:
    config = SimConfig(
        trace=TraceSpec(path=HEAD, speed=3.0),
        cluster=ClusterSpec(
            prefill_nodes=4,
            decode_nodes=2,
            dram_bytes=200 << 30,
            cache_scope=scope,
            decode_chunk_tokens=512 if policy == "elastic" else 0,
        ),
        engine=EngineSpec(prefill_efficiency=0.4),
        slo=Slo(ttft_ms=20_000.0, tbt_ms=100.0),
        prefill_policy=policy,
        scheduling=Settings(
            admission=admission,
            kvcache_balancing_threshold=1.5,
            hold_ms=2000.0 if admission == "priced" else 0.0,
        ),
    )
    cluster, lines = record(config)
    file = tmp_path / "run.record"
    with written(file) as write:
        for line in lines:
            write(line)
    num_decisions = 0
    for then, now in replay(read_lines(file)):
        assert then == Arrival.of(then.request, now, then.at)
        num_decisions += 1
    recorded = [line for line in lines if isinstance(line, Arrival)]
    held = sum(line.hold_ms > 0 for line in recorded)
    assert num_decisions - held == len(cluster.outcomes) == 500
    assert (held > 0) == (admission == "priced")
    assert len(recorded_trace(lines, "run").requests) == 500
    assert len({line.prefill for line in recorded}) >= 4
    assert any(line.reject_reason for line in recorded) or admission in ("none", "baseline")


def test_recording_changes_nothing() -> None:
    config = SimConfig(trace=TraceSpec(path=HEAD, end_s=60.0))
    cluster, _ = record(config)
    assert cluster.summary() == simulate(config).summary


def test_a_record_is_a_trace_for_another_cluster(tmp_path: Path) -> None:
    config = SimConfig(trace=TraceSpec(path=HEAD, end_s=60.0))
    cluster, lines = record(config)
    file = tmp_path / "run.record"
    with written(file) as write:
        for line in lines:
            write(line)
    trace = recorded_trace(read_lines(file), "run")
    assert [(r.prompt_tokens, r.output_tokens) for r in trace.requests] == [
        (o.prompt_tokens, o.output_tokens) for o in cluster.outcomes
    ]
    again = simulate(msgspec.structs.replace(config, trace=TraceSpec(path=str(file)))).summary
    original = cluster.summary()
    assert again.hit_rate_tokens == pytest.approx(original.hit_rate_tokens)
    assert again.ttft_ms.mean == pytest.approx(original.ttft_ms.mean)


@pytest.mark.parametrize("text", ['{"type": "nothing"}\n', "nonsense\n"])
def test_a_bad_record_names_its_line(tmp_path: Path, text: str) -> None:
    file = tmp_path / "bad.record"
    file.write_text(text)
    with pytest.raises(ConfigError, match="line 1"):
        list(replay(read_lines(file)))
