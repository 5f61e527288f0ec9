"""The prefill side of a P/D exchange: one leg at a time, other instances after failures."""

from enum import Enum
from typing import Protocol

from router.core.view import InstanceState
from router.http.leg import Leg
from router.instance import Instance
from router.protocols.base import Exchange

# A prefill that outlives its answer (the decode engine did not need it) may end by itself this long.
LINGER_S = 2.0


class PrefillFailure(Enum):
    BAD_REQUEST = "bad_request"  # the engine refused the request itself (4xx but 429)
    NEVER_RAN = "never_ran"  # not reached, cut off, or refused for load: it will write no KV
    FAILED = "failed"  # it answered an error (5xx); its connector has told the store


class PrefillListener(Protocol):
    def prefilled(self, leg: Leg) -> None:
        """The prefill is done; `leg` holds the complete response."""
        ...

    def prefill_failed(self, failure: PrefillFailure, leg: Leg) -> None:
        """No instance is left to try, or none would help. For BAD_REQUEST `leg` holds the response."""
        ...


class Prefill:
    """`exchange` sends the legs and keeps the count of retries; `body` is the same for each instance."""

    def __init__(self, exchange: Exchange, listener: PrefillListener, body: bytes) -> None:
        self._exchange = exchange
        self._listener = listener
        self._body = body
        self._leg: Leg | None = None
        self._instance: Instance | None = None

    @property
    def is_running(self) -> bool:
        return self._leg is not None

    def start(self, state: InstanceState, now: float) -> None:
        self._instance = self._exchange.services.cluster.instances[state.instance_id]
        self._leg = self._exchange.send(self, state, self._body, now)

    def cancel(self) -> None:
        leg, self._leg = self._leg, None
        if leg is not None:
            self._exchange.services.metrics.leg_over(self._instance, "cancelled")
            leg.cancel()

    def leg_head(self, leg: Leg) -> None:
        pass  # held until it is complete: its body may be needed

    def leg_ended(self, leg: Leg) -> None:
        assert self._instance is not None
        self._leg = None
        status = leg.status
        self._exchange.services.metrics.leg_over(self._instance, status)
        if status < 300:
            self._instance.breaker.succeeded()
            self._listener.prefilled(leg)
        elif status < 500 and status != 429:
            self._instance.breaker.succeeded()
            self._listener.prefill_failed(PrefillFailure.BAD_REQUEST, leg)
        else:
            # 503 is load as well: such an engine never looked at the request.
            failure = PrefillFailure.NEVER_RAN if status in (429, 503) else PrefillFailure.FAILED
            self._failed(failure, leg, str(status), counts=status >= 500)

    def leg_lost(self, leg: Leg) -> None:
        self._leg = None
        self._exchange.services.metrics.leg_over(self._instance, "lost")
        self._failed(PrefillFailure.NEVER_RAN, leg, "lost", counts=True)

    def _failed(self, failure: PrefillFailure, leg: Leg, reason: str, *, counts: bool) -> None:
        assert self._instance is not None
        exchange, services = self._exchange, self._exchange.services
        now = exchange.now()
        if counts:
            self._instance.breaker.failed(now)
        exchange.log_failure(self._instance, leg.failure or f"answered {leg.status}")
        if exchange.has_answer:
            return  # it is no longer needed
        exchange.exclude(self._instance)
        choice = services.scheduler.choose_prefill(exchange.view, services.cluster.view(now), now)
        if choice.instance is None or not exchange.may_retry(now):
            self._listener.prefill_failed(failure, leg)
            return
        services.metrics.retries["prefill", reason] += 1
        services.cluster.book.prefill_moved(exchange.view.request_id, choice, now)
        self.start(choice.instance, now)
