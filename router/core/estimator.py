"""Durations predicted from lengths. Models are data: core.fitting fits them, core.correction scales them.

The defaults stand for a dense 8B model on one GPU that sustains 150 TFLOPS and reads 1.5 TB/s: a place to
start from. `mooncake-router profile` measures the real ones.
"""

from __future__ import annotations

import msgspec

from kvcore.wire.events import Medium

_PARAMETERS = 8e9
_FLOPS_PER_S = 150e12
_MEMORY_BYTES_PER_S = 1.5e12
_KV_BYTES_PER_TOKEN = 131072  # 32 layers, 8 KV heads of 128, K and V, 2 bytes
_LAYERS, _HIDDEN = 32, 4096


class PrefillModel(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """T(n, p) = constant + linear * (n - p) + quadratic * (n^2 - p^2), n prompt and p prefix tokens.

    Dense layers cost in proportion to the tokens computed, attention to the pairs (query, earlier token),
    of which there are (n^2 - p^2) / 2. This is the polynomial the paper fits (section 6.1).
    """

    constant_ms: float = 2.0
    per_token_ms: float = 2 * _PARAMETERS / _FLOPS_PER_S * 1e3
    per_token2_ms: float = 2 * _LAYERS * _HIDDEN / _FLOPS_PER_S * 1e3

    def compute_ms(self, prompt_tokens: int, prefix_tokens: int) -> float:
        computed = prompt_tokens - prefix_tokens
        return (
            self.constant_ms
            + self.per_token_ms * computed
            + self.per_token2_ms * computed * (prompt_tokens + prefix_tokens)
        )


class DecodeModel(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """TBT(b, k) = constant + per_request * b + per_kv_token * k, b requests in the batch, k KV tokens read.

    A decode step reads the weights once (constant) and the KV cache of the batch.
    """

    constant_ms: float = 2 * _PARAMETERS / _MEMORY_BYTES_PER_S * 1e3
    per_request_ms: float = 0.02
    per_kv_token_ms: float = _KV_BYTES_PER_TOKEN / _MEMORY_BYTES_PER_S * 1e3

    def tbt_ms(self, batch_requests: float, kv_tokens: float) -> float:
        return self.constant_ms + self.per_request_ms * batch_requests + self.per_kv_token_ms * kv_tokens


class TransferModel(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """Moving KV. Rates in bytes per second; `cpu` is host memory to GPU."""

    kv_bytes_per_token: int = _KV_BYTES_PER_TOKEN
    latency_ms: float = 1.0
    network_bytes_per_s: float = 10e9
    cpu_bytes_per_s: float = 20e9
    disk_bytes_per_s: float = 3e9
    external_bytes_per_s: float = 1e9

    def remote_ms(self, tokens: int, medium: Medium, transfers_under_way: int = 0) -> float:
        """From another node. Its link is shared with the transfers it is sending already (section 6.1)."""
        if tokens <= 0:
            return 0.0
        rate = self.network_bytes_per_s / (1 + transfers_under_way)
        rate = min(rate, self._medium_bytes_per_s(medium))
        return self.latency_ms + tokens * self.kv_bytes_per_token / rate * 1e3

    def local_ms(self, tokens: int, medium: Medium) -> float:
        """From the node's own tiers to its GPU."""
        if medium is Medium.GPU or tokens <= 0:
            return 0.0
        return tokens * self.kv_bytes_per_token / self._medium_bytes_per_s(medium) * 1e3

    def _medium_bytes_per_s(self, medium: Medium) -> float:
        if medium is Medium.DISK:
            return self.disk_bytes_per_s
        if medium is Medium.EXTERNAL:
            return self.external_bytes_per_s
        return self.cpu_bytes_per_s
