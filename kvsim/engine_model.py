"""How long an engine takes: the formulas of the Mooncake paper (FAST '25, section 3.2 and table 2).

    flops(n, p) = l * (a * (n^2 - p^2) * d + b * (n - p) * d^2)        n prompt tokens, p of them cached
    KV bytes of a token = l * 2 * d / gqa * s                          s = 2 bytes (bfloat16)

A prefill is bound by compute, a decode step by memory: it reads the weights once and all KV of its batch.
With l = 80, d = 8192, a = 4, b = 22, gqa = 8 (LLaMA3-70B and LLaMA2-70B alike) a token's KV has 320 KiB.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvcore.errors import ConfigError
from router.core.estimator import DecodeModel, PrefillModel, TransferModel

Share = Annotated[float, Meta(gt=0, le=1)]
Positive = Annotated[float, Meta(gt=0)]


class ModelShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Letters of the paper's table 2: l, d, a, b, gqa, s."""

    layers: int
    hidden: int
    attention_factor: float
    linear_factor: float
    gqa: int
    weight_bytes: float
    value_bytes: int = 2

    @property
    def kv_bytes_per_token(self) -> int:
        return self.layers * 2 * (self.hidden // self.gqa) * self.value_bytes

    def prefill_flops(self, prompt_tokens: float, prefix_tokens: float) -> float:
        n, p, d = prompt_tokens, prefix_tokens, self.hidden
        return self.layers * (
            self.attention_factor * (n * n - p * p) * d + self.linear_factor * (n - p) * d * d
        )


class Gpu(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Peak figures of the data sheet: dense bfloat16 flops, memory bandwidth and size."""

    flops_per_s: float
    memory_bytes_per_s: float
    memory_bytes: int


MODELS = {
    "llama3-70b": ModelShape(80, 8192, 4.0, 22.0, 8, 141.2e9),
    "llama2-70b": ModelShape(80, 8192, 4.0, 22.0, 8, 138.0e9),
    # The paper has no figure for it: 2 flops for each of its 13 d^2 weights a layer.
    "llama3-8b": ModelShape(32, 4096, 4.0, 26.0, 4, 16.1e9),
}
GPUS = {
    "a800": Gpu(312e12, 2.039e12, 80 << 30),
    "h800": Gpu(989e12, 3.35e12, 80 << 30),
}


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One node: `gpus_per_node` GPUs run the model tensor-parallel.

    Shares of peak that are sustained: `prefill_efficiency` of flops, `weight_read_efficiency` and
    `kv_read_efficiency` of memory bandwidth in a decode step. The last is low by default, as the paged
    attention kernels of the paper's vLLM read grouped KV heads once for each query head; with today's kernels
    0.6 is nearer. `profile_prefill` and `profile_decode`, fitted from a profile, replace the formulas.
    `max_batch_requests`: of one decode batch. Bandwidths are those of a node, as in table 2.
    """

    model: str = "llama3-70b"
    gpu: str = "a800"
    gpus_per_node: Annotated[int, Meta(ge=1)] = 8
    prefill_efficiency: Share = 0.5
    weight_read_efficiency: Share = 0.6
    kv_read_efficiency: Share = 0.12
    prefill_constant_ms: float = 20.0
    decode_constant_ms: float = 15.0
    decode_per_request_ms: float = 0.3
    max_batch_requests: Annotated[int, Meta(ge=1)] = 256
    memory_share: Share = 0.9
    h2d_bytes_per_s: Positive = 128e9
    nic_bytes_per_s: Positive = 100e9
    disk_bytes_per_s: Positive = 6e9
    nic_latency_ms: float = 1.0
    profile_prefill: PrefillModel | None = None
    profile_decode: DecodeModel | None = None

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise ConfigError(f"no model {self.model!r}; there are: {', '.join(MODELS)}")
        if self.gpu not in GPUS:
            raise ConfigError(f"no GPU {self.gpu!r}; there are: {', '.join(GPUS)}")
        if self.kv_capacity_tokens < 1:
            raise ConfigError(
                f"{self.model} leaves no memory for KV on {self.gpus_per_node} x {self.gpu}: "
                "use more gpus_per_node or a larger memory_share"
            )

    @property
    def shape(self) -> ModelShape:
        return MODELS[self.model]

    @property
    def kv_bytes_per_token(self) -> int:
        return self.shape.kv_bytes_per_token

    @property
    def kv_capacity_tokens(self) -> int:
        """What fits in the GPUs' memory beside the weights."""
        free_bytes = self.gpus_per_node * GPUS[self.gpu].memory_bytes * self.memory_share
        return int((free_bytes - self.shape.weight_bytes) // self.kv_bytes_per_token)

    def prefill_model(self) -> PrefillModel:
        """In the form the router estimates with; exact, as the formula is the same polynomial."""
        if self.profile_prefill is not None:
            return self.profile_prefill
        flops_per_ms = GPUS[self.gpu].flops_per_s * self.gpus_per_node * self.prefill_efficiency / 1e3
        shape = self.shape
        return PrefillModel(
            self.prefill_constant_ms,
            shape.layers * shape.linear_factor * shape.hidden**2 / flops_per_ms,
            shape.layers * shape.attention_factor * shape.hidden / flops_per_ms,
        )

    def decode_model(self) -> DecodeModel:
        if self.profile_decode is not None:
            return self.profile_decode
        peak_bytes_per_ms = GPUS[self.gpu].memory_bytes_per_s * self.gpus_per_node / 1e3
        weights_ms = self.shape.weight_bytes / (peak_bytes_per_ms * self.weight_read_efficiency)
        return DecodeModel(
            self.decode_constant_ms + weights_ms,
            self.decode_per_request_ms,
            self.kv_bytes_per_token / (peak_bytes_per_ms * self.kv_read_efficiency),
        )

    def transfer_model(self) -> TransferModel:
        return TransferModel(
            kv_bytes_per_token=self.kv_bytes_per_token,
            latency_ms=self.nic_latency_ms,
            network_bytes_per_s=self.nic_bytes_per_s,
            cpu_bytes_per_s=self.h2d_bytes_per_s,
            disk_bytes_per_s=self.disk_bytes_per_s,
        )


class PrefillCost(msgspec.Struct, frozen=True):
    """`occupied_ms`: until the group can begin the next prompt; `latency_ms`: until this one is done."""

    occupied_ms: float
    latency_ms: float


def pipelined_prefill(
    model: PrefillModel, prompt_tokens: int, prefix_tokens: int, num_nodes: int, chunk_tokens: int
) -> PrefillCost:
    """Chunked pipeline parallelism (section 5.1): layers are divided over `num_nodes` nodes, and chunks of
    `chunk_tokens` of the prompt follow each other through them.

    Each stage takes its share of a chunk's time, so the group computes `num_nodes` chunks at once; the last
    chunk still has to pass the stages after the first. A prompt of one chunk gains nothing.
    """
    total_ms = model.compute_ms(prompt_tokens, prefix_tokens)
    if num_nodes == 1:
        return PrefillCost(total_ms, total_ms)
    computed = prompt_tokens - prefix_tokens
    last = (computed - 1) % chunk_tokens + 1
    last_ms = min(model.compute_ms(prompt_tokens, prompt_tokens - last), total_ms)
    occupied_ms = total_ms / num_nodes
    return PrefillCost(occupied_ms, occupied_ms + last_ms * (num_nodes - 1) / num_nodes)
