"""How much slower or faster one instance is than the model says, learned while it serves."""

from __future__ import annotations

import math

LIMIT = 8.0


class Correction:
    """`scale` multiplies predictions. It follows the geometric mean of measured / predicted, because a ratio
    of 2 and one of 1/2 must cancel, and each measurement moves it by `weight`; outliers beyond LIMIT count as
    LIMIT."""

    def __init__(self, weight: float = 0.1) -> None:
        self._weight = weight
        self._log_scale = 0.0
        self.scale = 1.0

    def measured(self, measured_ms: float, predicted_ms: float) -> None:
        """`predicted_ms` is what the model said before scaling. Nonsense (not positive) is ignored."""
        if not (measured_ms > 0 and predicted_ms > 0):
            return
        ratio = min(max(measured_ms / predicted_ms, 1 / LIMIT), LIMIT)
        self._log_scale += self._weight * (math.log(ratio) - self._log_scale)
        self.scale = math.exp(self._log_scale)
