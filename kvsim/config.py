"""What is simulated: a TOML file (configs/sim/*.toml), flags of the same names before it."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvcore.errors import ConfigError
from kvsim.engine_model import EngineSpec
from kvsim.trace import DEFAULT_BLOCK_SIZE_TOKENS
from kvsim.workload import Synthetic
from router.core.settings import Settings


class TraceSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    path: Annotated[str, Meta(description="trace to replay; empty: the [synthetic] load")] = ""
    speed: Annotated[float, Meta(gt=0, le=1000, description="replayed this many times as fast")] = 1.0
    begin_s: Annotated[float, Meta(ge=0, description="requests before are left out")] = 0.0
    end_s: Annotated[float, Meta(ge=0, description="requests from then on are left out; 0: none")] = 0.0
    poisson_rps: Annotated[
        float,
        Meta(ge=0, le=1e6, description="arrivals drawn at this rate, in the trace's order; 0: as recorded"),
    ] = 0.0
    block_size_tokens: Annotated[int, Meta(gt=0, description="tokens one hash id stands for")] = (
        DEFAULT_BLOCK_SIZE_TOKENS
    )


class ClusterSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`kind` disaggregated: prefill and decode nodes; coupled: `mixed_nodes` that do both, as plain vLLM."""

    kind: Literal["disaggregated", "coupled"] = "disaggregated"
    prefill_nodes: Annotated[int, Meta(ge=1)] = 8
    decode_nodes: Annotated[int, Meta(ge=1)] = 8
    mixed_nodes: Annotated[int, Meta(ge=1)] = 16
    prefill_group_nodes: Annotated[
        int, Meta(ge=1, description="nodes that prefill one prompt together (chunked pipeline parallelism)")
    ] = 1
    prefill_chunk_tokens: Annotated[int, Meta(ge=1, description="chunk of that pipeline")] = 4096
    dram_bytes: Annotated[int, Meta(ge=0, description="for KV, on each prefill node")] = 1 << 40
    ssd_bytes: Annotated[int, Meta(ge=0, description="for KV, on each prefill node")] = 0
    cache_scope: Annotated[
        Literal["none", "node", "pool", "global"],
        Meta(
            description="node: each its own; pool: each its own, others may copy from it; "
            "global: one store over all nodes, no block in it twice"
        ),
    ] = "pool"
    eviction_policy: str = "lru"
    decode_chunk_tokens: Annotated[
        int,
        Meta(
            ge=0,
            description="token budget of a decode node's step when it may prefill as well; 0: it never does",
        ),
    ] = 0
    layerwise: Annotated[bool, Meta(description="KV is loaded and sent while layers compute")] = True
    coupled_prefix_caching: Annotated[bool, Meta(description="coupled nodes keep KV in their GPUs")] = True
    coupled_chunk_tokens: Annotated[
        int, Meta(ge=0, description="token budget of a step with chunked prefill; 0: whole prompts")
    ] = 0

    def __post_init__(self) -> None:
        if self.decode_chunk_tokens and (self.kind != "disaggregated" or self.cache_scope != "pool"):
            raise ConfigError("decode_chunk_tokens needs kind = disaggregated and cache_scope = pool")
        if self.kind == "disaggregated" and self.prefill_nodes % self.prefill_group_nodes:
            raise ConfigError(
                f"{self.prefill_nodes} prefill_nodes cannot be divided into groups of "
                f"{self.prefill_group_nodes} (prefill_group_nodes)"
            )

    @property
    def num_nodes(self) -> int:
        return self.mixed_nodes if self.kind == "coupled" else self.prefill_nodes + self.decode_nodes

    @property
    def label(self) -> str:
        if self.kind == "coupled":
            return f"{self.mixed_nodes}M"
        return f"{self.prefill_nodes}P+{self.decode_nodes}D"


class Slo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a request must keep to count as good. The TBT of a request is the mean of its longest tenth of
    intervals between tokens."""

    ttft_ms: Annotated[float, Meta(gt=0)] = 30_000.0
    tbt_ms: Annotated[float, Meta(gt=0)] = 200.0


class SimConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`scheduling` is the router's own table; its models are replaced by those of `engine`, as a profile
    would, and its SLOs of 0 by `slo` when it has an admission policy."""

    name: Annotated[str, Meta(description="how reports call this run")] = ""
    seed: int = 0
    trace: TraceSpec = TraceSpec()
    synthetic: Synthetic | None = None
    cluster: ClusterSpec = ClusterSpec()
    engine: EngineSpec = EngineSpec()
    slo: Slo = Slo()
    prefill_policy: Annotated[str, Meta(description="or the policy of coupled nodes")] = "global_cache_aware"
    decode_policy: str = "least_tbt"
    scheduling: Settings = Settings()
    sample_ms: Annotated[float, Meta(ge=100, description="between samples of load")] = 5_000.0

    @property
    def label(self) -> str:
        return self.name or f"{self.cluster.label} {self.prefill_policy} {self.scheduling.admission}"

    def settings(self) -> Settings:
        has_admission = self.scheduling.admission != "none"
        transfer = self.engine.transfer_model()
        if self.cluster.cache_scope == "global":
            # What the store holds comes over the network, whoever computes.
            rate = min(transfer.cpu_bytes_per_s, transfer.network_bytes_per_s)
            transfer = msgspec.structs.replace(transfer, cpu_bytes_per_s=rate)
        prefill = self.engine.prefill_model()
        group = self.cluster.prefill_group_nodes
        if self.cluster.kind == "disaggregated" and group > 1:
            prefill = msgspec.structs.replace(
                prefill,
                per_token_ms=prefill.per_token_ms / group,
                per_token2_ms=prefill.per_token2_ms / group,
            )
        return msgspec.structs.replace(
            self.scheduling,
            seed=self.scheduling.seed or self.seed,
            decode_chunk_tokens=self.scheduling.decode_chunk_tokens or self.cluster.decode_chunk_tokens,
            ttft_slo_ms=self.scheduling.ttft_slo_ms or (self.slo.ttft_ms if has_admission else 0.0),
            tbt_slo_ms=self.scheduling.tbt_slo_ms or (self.slo.tbt_ms if has_admission else 0.0),
            prefill_model=prefill,
            decode_model=self.engine.decode_model(),
            transfer_model=transfer,
        )
