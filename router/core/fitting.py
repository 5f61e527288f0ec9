"""Models from measurements (`mooncake-router profile`, kvsim)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvcore.errors import ConfigError
from router.core.estimator import DecodeModel, PrefillModel


class PrefillSample(msgspec.Struct, frozen=True):
    prompt_tokens: int
    prefix_tokens: int
    measured_ms: float


class DecodeSample(msgspec.Struct, frozen=True):
    batch_requests: int
    kv_tokens: int
    measured_ms: float


def fit_prefill(samples: Sequence[PrefillSample]) -> PrefillModel:
    """ConfigError when the samples cannot tell the coefficients apart (too few, or all alike)."""
    n = np.array([s.prompt_tokens for s in samples], dtype=float)
    p = np.array([s.prefix_tokens for s in samples], dtype=float)
    design = np.stack([np.ones_like(n), n - p, n * n - p * p], axis=1) if samples else np.empty((0, 3))
    return PrefillModel(*_fit(design, [s.measured_ms for s in samples], "prompt and prefix lengths"))


def fit_decode(samples: Sequence[DecodeSample]) -> DecodeModel:
    """ConfigError when the samples cannot tell the coefficients apart (too few, or all alike)."""
    b = np.array([s.batch_requests for s in samples], dtype=float)
    k = np.array([s.kv_tokens for s in samples], dtype=float)
    design = np.stack([np.ones_like(b), b, k], axis=1) if samples else np.empty((0, 3))
    return DecodeModel(*_fit(design, [s.measured_ms for s in samples], "batch sizes and context lengths"))


def relative_errors(model: PrefillModel, samples: Sequence[PrefillSample]) -> list[float]:
    """|predicted - measured| / measured of each sample."""
    return [
        abs(model.compute_ms(s.prompt_tokens, s.prefix_tokens) - s.measured_ms) / s.measured_ms
        for s in samples
    ]


def _fit(design: NDArray[np.float64], measured_ms: Sequence[float], what: str) -> list[float]:
    """Non-negative least squares on relative errors, so that short prompts count as much as long ones.

    No coefficient has a meaning below zero; where the best one would be, the measurements are noise in that
    direction and the term is left out.
    """
    measured = np.array(measured_ms, dtype=float)
    if len(measured) < design.shape[1] or np.linalg.matrix_rank(design) < design.shape[1]:
        raise ConfigError(
            f"cannot fit: measure at least three different {what} (got {len(measured)} samples)"
        )
    if not np.all(np.isfinite(measured)) or np.any(measured <= 0):
        raise ConfigError("cannot fit: every measured duration must be a positive number of milliseconds")
    weighted = design / measured[:, None]
    column_scale = np.linalg.norm(weighted, axis=0)
    weighted = weighted / column_scale
    target = np.ones_like(measured)
    active = list(range(design.shape[1]))
    while active:
        solution = np.linalg.lstsq(weighted[:, active], target, rcond=None)[0]
        if np.all(solution >= 0):
            break
        del active[int(np.argmin(solution))]
    coefficients = np.zeros(design.shape[1])
    if active:
        coefficients[active] = solution / column_scale[active]
    return [float(c) for c in coefficients]
