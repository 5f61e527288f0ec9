"""What one instance has to do, from what we sent it and what it says itself.

A poll is old when it arrives and misses what was sent since; our own bookkeeping misses what other routers
send. So own load is counted here, and of a poll only the part that is not ours is believed ("foreign"), until
the next one (vllm-project/router#178: eight requests in a row to the instance idle at the last poll).
Prefills of an instance are taken to run one after the other, as the paper does: they are bound by compute, so
batching them changes who waits but not how long the queue is.
"""

from __future__ import annotations

from router.core.correction import Correction
from router.core.decode_clock import DecodeClock
from router.core.estimator import DecodeModel
from router.core.load_report import LoadReport
from router.core.view import NO_WORKER, InstanceState, Role

_DEFAULT_MODEL = DecodeModel()


class _Prefill:
    __slots__ = ("model_ms", "predicted_ms", "sent_at")

    def __init__(self, sent_at: float, predicted_ms: float, model_ms: float) -> None:
        self.sent_at = sent_at
        self.predicted_ms = predicted_ms  # scaled
        self.model_ms = model_ms  # not scaled


class _Decode:
    __slots__ = ("kv_tokens", "mean_kv_tokens", "sent_at")

    def __init__(self, sent_at: float, kv_tokens: int, mean_kv_tokens: float) -> None:
        self.sent_at = sent_at
        self.kv_tokens = kv_tokens  # reserved
        self.mean_kv_tokens = mean_kv_tokens


class InstanceBook:
    def __init__(
        self,
        instance_id: str,
        worker: int = NO_WORKER,
        store_worker: int = NO_WORKER,
        kv_capacity_tokens: int = 0,
        decode_model: DecodeModel = _DEFAULT_MODEL,
        role: Role = Role.MIXED,
    ) -> None:
        self.instance_id = instance_id
        self.worker = worker
        self.store_worker = store_worker
        self._kv_capacity_tokens = kv_capacity_tokens
        self._prefill_correction = Correction()
        self._tbt_correction = Correction()
        self._clock = DecodeClock(decode_model)
        self._role = role
        self._prefills: dict[str, _Prefill] = {}  # in the order they were sent
        self._decodes: dict[str, _Decode] = {}
        self._num_legs = 0
        self._pending_ms = 0.0
        self._own_free_at = 0.0
        self._last_done_at = 0.0
        self._mean_prefill_ms = 0.0
        self._own_kv_tokens = 0
        self._foreign_free_at = 0.0
        self._foreign_waiting = 0
        self._foreign_running = 0
        self._foreign_kv_tokens = 0
        self._state: InstanceState | None = None

    @property
    def num_legs(self) -> int:
        """Requests of ours on it; one that prefills and decodes here counts once."""
        return self._num_legs

    def state(self, now: float) -> InstanceState:
        """Remade only when something has changed."""
        if self._state is None:
            self._state = self.look(now)
        return self._state

    def look(self, now: float) -> InstanceState:
        """The same for whoever only watches: it leaves no trace in later decisions."""
        queue_s = max(0.0, self._own_free_at - now) + max(0.0, self._foreign_free_at - now)
        head = next(iter(self._prefills.values()), None)
        return InstanceState(
            self.instance_id,
            self.worker,
            self.store_worker,
            self.num_legs,
            self._foreign_waiting + self._foreign_running,
            now + queue_s,
            self._pending_ms - head.predicted_ms if head is not None else 0.0,
            len(self._decodes) + self._foreign_running,
            self._own_kv_tokens + self._foreign_kv_tokens,
            self._kv_capacity_tokens,
            self._prefill_correction.scale,
            self._tbt_correction.scale,
            self._clock.requests,
            self._clock.kv_tokens,
        )

    def configure(self, decode_model: DecodeModel) -> None:
        self._clock.configure(decode_model)

    # ---- what we send -----------------------------------------------------------------------------------

    def prefill_sent(self, request_id: str, model_ms: float, now: float) -> float:
        """`model_ms`: predicted, before this instance's scale. Returns when it should be done."""
        if request_id not in self._prefills and request_id not in self._decodes:
            self._num_legs += 1
        predicted_ms = model_ms * self._prefill_correction.scale
        self._prefills[request_id] = _Prefill(now, predicted_ms, model_ms)
        self._pending_ms += predicted_ms
        self._own_free_at = max(self._own_free_at, now) + predicted_ms / 1e3
        self._mean_prefill_ms += 0.1 * (predicted_ms - self._mean_prefill_ms)
        self._state = None
        return self._own_free_at + max(0.0, self._foreign_free_at - now)

    def prefill_ended(self, request_id: str, now: float, completed: bool) -> None:
        """Not `completed`: it failed or was cancelled, and says nothing about this instance's speed."""
        prefill = self._prefills.pop(request_id, None)
        if prefill is None:
            return
        if request_id not in self._decodes:
            self._num_legs -= 1
        # Prefills sent while others ran began when those were done.
        if completed:
            began_at = max(prefill.sent_at, self._last_done_at)
            self._prefill_correction.measured((now - began_at) * 1e3, prefill.model_ms)
            self._last_done_at = now
            if self._role is Role.DECODE:
                # Its prefills are ours to give and to stop giving: they do not make it a slow decoder. To a
                # mixed instance they belong.
                self._clock.stood_still(prefill.model_ms)
        self._pending_ms = self._pending_ms - prefill.predicted_ms if self._prefills else 0.0
        self._own_free_at = now + self._pending_ms / 1e3
        self._state = None

    def decode_sent(self, request_id: str, kv_tokens: int, mean_kv_tokens: float, now: float) -> None:
        """`kv_tokens`: what its KV cache will hold at its end, reserved from now on; `mean_kv_tokens`: on
        average while it decodes."""
        self.decode_ended(request_id, now, 0)
        if request_id not in self._prefills:
            self._num_legs += 1
        self._decodes[request_id] = _Decode(now, kv_tokens, mean_kv_tokens)
        self._own_kv_tokens += kv_tokens
        self._state = None

    def decode_started(self, request_id: str, now: float) -> None:
        decode = self._decodes.get(request_id)
        if decode is not None:
            self._clock.began(request_id, decode.mean_kv_tokens, now)
            self._state = None

    def decode_ended(self, request_id: str, now: float, output_tokens: int) -> None:
        """`output_tokens` 0: it failed or was cancelled."""
        decode = self._decodes.pop(request_id, None)
        if decode is None:
            return
        if request_id not in self._prefills:
            self._num_legs -= 1
        model_steps = self._clock.ended(request_id, now)
        if output_tokens > 1:
            # Each of its steps took so many of the model's.
            self._tbt_correction.measured(model_steps, output_tokens - 1)
        self._own_kv_tokens -= decode.kv_tokens
        self._state = None

    # ---- what it says -----------------------------------------------------------------------------------

    def polled(self, report: LoadReport, prefill_ms_per_token: float) -> None:
        """Own legs that ended between the sample and now count as foreign until the next poll."""
        at = report.sampled_at
        own_waiting = [p for p in self._prefills.values() if p.sent_at <= at]
        own_running = [d for r, d in self._decodes.items() if d.sent_at <= at and r not in self._prefills]
        self._foreign_waiting = max(0, report.waiting_requests - len(own_waiting))
        # An engine may run what we believe waits, never more than both together.
        own = len(own_waiting) + len(own_running)
        total = report.waiting_requests + report.running_requests
        self._foreign_running = max(0, total - own - self._foreign_waiting)
        if report.waiting_prefill_tokens >= 0:
            queued_ms = report.waiting_prefill_tokens * prefill_ms_per_token * self._prefill_correction.scale
            foreign_ms = max(0.0, queued_ms - sum(p.predicted_ms for p in own_waiting))
        else:
            foreign_ms = self._foreign_waiting * self._mean_prefill_ms
        self._foreign_free_at = at + foreign_ms / 1e3
        if report.kv_used_tokens >= 0:
            own_kv = sum(d.kv_tokens for d in own_running)
            self._foreign_kv_tokens = max(0, report.kv_used_tokens - own_kv)
        self._clock.polled(report.running_requests, report.kv_used_tokens, at)
        if report.kv_capacity_tokens > 0:
            self._kv_capacity_tokens = report.kv_capacity_tokens
        self._state = None
