"""Decode load to come, from the requests under way (paper section 7.4)."""

from __future__ import annotations

import numpy as np

from router.core.length_history import BUCKETS_PER_OCTAVE, NUM_BUCKETS, LengthHistory


class Forecast:
    """One row per request that is prefilling or decoding. Questions are answered over all rows at once."""

    def __init__(self, history: LengthHistory, unknown_decode_ms: float = 10_000.0) -> None:
        self._history = history
        self._rows: dict[str, int] = {}
        self._free: list[int] = []
        self._start_at = np.full(64, np.inf)  # of decoding; predicted, later measured
        self._kv_tokens = np.zeros(64)
        self._output_tokens = np.zeros(64)
        self._tbt_ms = np.ones(64)
        self.mean_decode_ms = unknown_decode_ms

    def __len__(self) -> int:
        return len(self._rows)

    def add(
        self, request_id: str, start_at: float, kv_tokens: float, output_tokens: float, tbt_ms: float
    ) -> None:
        """A request was sent; its decoding is expected to begin at `start_at`."""
        if request_id in self._rows:
            self.remove(request_id)
        if not self._free:
            self._grow()
        row = self._rows[request_id] = self._free.pop()
        self._start_at[row] = start_at
        self._kv_tokens[row] = kv_tokens
        self._output_tokens[row] = output_tokens
        self._tbt_ms[row] = max(tbt_ms, 1e-3)

    def started(self, request_id: str, now: float) -> None:
        row = self._rows.get(request_id)
        if row is not None:
            self._start_at[row] = now

    def remove(self, request_id: str) -> None:
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._start_at[row] = np.inf
            self._free.append(row)

    def finished(self, request_id: str, now: float) -> None:
        """It decoded to its end: t_d follows what is measured."""
        row = self._rows.get(request_id)
        if row is None:
            return
        decode_ms = max(0.0, (now - float(self._start_at[row])) * 1e3)
        self.mean_decode_ms += 0.02 * (decode_ms - self.mean_decode_ms)
        self.remove(request_id)

    def uniform_load_at(self, at: float, decode_ms: float) -> tuple[float, float]:
        active = (self._start_at <= at) & (self._start_at + decode_ms / 1e3 > at)
        return float(np.count_nonzero(active)), float(self._kv_tokens[active].sum())

    def expected_load_at(self, at: float, now: float) -> tuple[float, float]:
        end_at = self._start_at + self._output_tokens * self._tbt_ms / 1e3
        overdue = (end_at <= now) & (self._start_at <= now)
        if overdue.any():
            tbt_ms = self._tbt_ms[overdue]
            produced = np.maximum((now - self._start_at[overdue]) * 1e3 / tbt_ms, 1.0)
            buckets = (np.log2(produced) * BUCKETS_PER_OCTAVE).astype(np.int64)
            remaining = self._history.remaining_tokens()[np.minimum(buckets, NUM_BUCKETS - 1)]
            end_at[overdue] = now + remaining * tbt_ms / 1e3
        active = (self._start_at <= at) & (end_at > at)
        return float(np.count_nonzero(active)), float(self._kv_tokens[active].sum())

    def _grow(self) -> None:
        size = len(self._start_at)
        if not self._rows and not self._free:
            self._free = list(range(size))
            return
        self._start_at = np.append(self._start_at, np.full(size, np.inf))
        for name in ("_kv_tokens", "_output_tokens", "_tbt_ms"):
            column = getattr(self, name)
            setattr(self, name, np.append(column, np.ones(size)))
        self._free = list(range(size, 2 * size))
