"""How many decode steps an instance should have made by now, if it were as fast as the model says.

What a request's measured TBT is compared with. The load it was admitted for would not do: that counts
requests which still wait for their prefill, and KV that will be there at the end. An engine exactly as fast
as the model would seem faster, more would be sent to it, and the error would grow with the queue.
"""

from __future__ import annotations

from router.core.estimator import DecodeModel


class DecodeClock:
    """`requests` and `kv_tokens` are what decodes at this moment: ours that have begun, and others that only
    the instance itself knows of (sent by somebody else, or not streamed)."""

    __slots__ = (
        "_at",
        "_joined",
        "_model",
        "_other_kv_tokens",
        "_other_requests",
        "_own_kv_tokens",
        "_steps",
        "_still_ms",
    )

    def __init__(self, model: DecodeModel) -> None:
        self._model = model
        self._at = 0.0
        self._steps = 0.0
        self._still_ms = 0.0
        self._joined: dict[str, tuple[float, float]] = {}  # by request: steps when it began, its KV tokens
        self._own_kv_tokens = 0.0
        self._other_requests = 0
        self._other_kv_tokens = 0.0

    @property
    def requests(self) -> int:
        return len(self._joined) + self._other_requests

    @property
    def kv_tokens(self) -> float:
        return self._own_kv_tokens + self._other_kv_tokens

    def configure(self, model: DecodeModel) -> None:
        self._model = model

    def began(self, request_id: str, kv_tokens: float, now: float) -> None:
        """`kv_tokens`: what it holds on average while it decodes."""
        self._advance(now)
        self._leave(request_id)
        self._joined[request_id] = (self._steps, kv_tokens)
        self._own_kv_tokens += kv_tokens

    def ended(self, request_id: str, now: float) -> float:
        """Steps since it began; 0 when it never did."""
        self._advance(now)
        return self._leave(request_id)

    def stood_still(self, duration_ms: float) -> None:
        """So much of the time since it was told last was spent on prefills, by the model."""
        self._still_ms += duration_ms

    def polled(self, running_requests: int, kv_used_tokens: int, now: float) -> None:
        """What the instance says. `kv_used_tokens` below 0: it does not; others are as long as ours then."""
        self._advance(now)
        own = len(self._joined)
        self._other_requests = max(0, running_requests - own)
        if not self._other_requests:
            self._other_kv_tokens = 0.0
        elif kv_used_tokens >= 0:
            self._other_kv_tokens = max(0.0, kv_used_tokens - self._own_kv_tokens)
        else:
            self._other_kv_tokens = self._other_requests * self._own_kv_tokens / max(own, 1)

    def _leave(self, request_id: str) -> float:
        began = self._joined.pop(request_id, None)
        if began is None:
            return 0.0
        self._own_kv_tokens = self._own_kv_tokens - began[1] if self._joined else 0.0
        return self._steps - began[0]

    def _advance(self, now: float) -> None:
        if now <= self._at:
            return
        elapsed_ms = (now - self._at) * 1e3
        self._at = now
        if not self.requests:
            self._still_ms = 0.0
            return
        # What is told afterwards is taken from the time that follows.
        still_ms = min(self._still_ms, elapsed_ms)
        self._still_ms -= still_ms
        step_ms = self._model.tbt_ms(self.requests, self.kv_tokens)
        if step_ms > 0:
            self._steps += (elapsed_ms - still_ms) / step_ms
