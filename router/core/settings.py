"""What policies and admission are built from: the `[scheduling]` part of router.toml."""

import math

import msgspec

from kvcore.errors import ConfigError
from router.core.estimator import DecodeModel, PrefillModel, TransferModel
from router.core.prng import SplitMix64


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`seed`: of everything drawn at random, so that a run can be repeated.

    `kvcache_balancing_threshold`: Algorithm 1's; a remote prefix is fetched when it is this many times as
    long as the instance's own. SLOs of 0 mean no limit; a request's own ones go before them. `admission` is
    one of router.core.admission.ADMISSIONS. `hold_ms`: who is refused for load waits in front of the engines
    and is asked again so often, while its TTFT SLO can be kept; 0: refused at once. Requests of a priority
    above 0 (less urgent, as in vLLM) are admitted up to `sheddable_slo_share` of the SLOs only, so that they
    are the first to be refused. `decode_ms` is the uniform t_d of admission "predictive"; 0: the measured
    mean. `price_exponent`: how fast admission "priced" gets more expensive as load grows.
    `decode_chunk_tokens`: the token budget of a step on decode instances (vLLM's max_num_batched_tokens), for
    policy "elastic", which lets them prefill; 0: never.
    """

    seed: int = 0
    kvcache_balancing_threshold: float = 2.0
    ttft_slo_ms: float = 0.0
    tbt_slo_ms: float = 0.0
    admission: str = "none"
    hold_ms: float = 0.0
    sheddable_slo_share: float = 0.8
    decode_ms: float = 0.0
    price_exponent: float = 4.0
    decode_chunk_tokens: int = 0
    expected_output_tokens: int = 256
    prefill_model: PrefillModel = PrefillModel()
    decode_model: DecodeModel = DecodeModel()
    transfer_model: TransferModel = TransferModel()

    def __post_init__(self) -> None:
        if not self.kvcache_balancing_threshold >= 1.0:
            raise ConfigError(
                "kvcache_balancing_threshold is a ratio of prefix lengths and must be at least 1, "
                f"not {self.kvcache_balancing_threshold}"
            )
        if not 0.0 < self.sheddable_slo_share <= 1.0:
            raise ConfigError(f"sheddable_slo_share must be in (0, 1], not {self.sheddable_slo_share}")
        for name in ("ttft_slo_ms", "tbt_slo_ms", "hold_ms", "decode_ms"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0.0):
                raise ConfigError(f"{name} must be a number of milliseconds, not {value}")
        if not (math.isfinite(self.price_exponent) and self.price_exponent > 0.0):
            raise ConfigError(f"price_exponent must be a positive number, not {self.price_exponent}")
        if self.decode_chunk_tokens < 0:
            raise ConfigError(f"decode_chunk_tokens must not be negative, not {self.decode_chunk_tokens}")
        if self.expected_output_tokens < 0:
            raise ConfigError(
                f"expected_output_tokens must not be negative, not {self.expected_output_tokens}"
            )

    def prng(self) -> SplitMix64:
        return SplitMix64(self.seed)
