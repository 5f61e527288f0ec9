"""Two legs that need each other: both go out at once, and when one fails the other is closed at once.

An engine whose partner never comes waits for minutes (sgl-project/sglang#9726: 300 s), so each try is a fresh
pair, with names of its own, and nothing is ever sent to one side alone.

A decode engine may begin a stream long before it has anything to say (vLLM 0.32 sends the head at once, and
comments to keep the connection open). Such a head is kept back: while the client has seen nothing, a prefill
that fails still means another pair, and not an answer that never comes.
"""

import msgspec

from router.core.decision import Decision, Rejection, RejectReason
from router.core.view import InstanceState, RequestView
from router.http.leg import Leg
from router.http.request import Request
from router.http.server import ClientConnection
from router.instance import Instance
from router.protocols.base import Exchange, Services
from router.protocols.bodies import Fields, read_fields
from router.protocols.prefill import LINGER_S


class PairBodies:
    """`prefill_lines`: header lines for the prefill leg alone."""

    def __init__(self, prefill: bytes, decode: bytes, prefill_lines: bytes = b"") -> None:
        self.prefill = prefill
        self.decode = decode
        self.prefill_lines = prefill_lines


class PairExchange(Exchange):
    """A protocol says what the two bodies are."""

    def __init__(
        self, services: Services, client: ClientConnection, request: Request, view: RequestView
    ) -> None:
        super().__init__(services, client, request, view)
        self.fields: Fields = {}
        self._decode_body = b""
        self._prefill: _PrefillLeg | None = None
        self._silent: Leg | None = None  # has answered with the head of a stream, and nothing in it

    def bodies(self, prefill: Instance) -> "PairBodies":
        """Of one try with this prefill instance; never the same names twice."""
        raise AssertionError("a protocol has bodies")

    def without_prefill(self, decision: Decision) -> Decision:
        """There is no prefill instance left. A protocol whose decode engines can prefill returns the decision
        as it is: the request then goes to the decode instance alone."""
        detail = "no prefill engine is available, and decode engines cannot prefill here"
        return Decision(reject=Rejection(RejectReason.NO_INSTANCE, detail=detail))

    def unservable(self) -> str:
        """What a client can do about a request that engines of this protocol cannot serve, or ""."""
        return ""

    def prefill_failed(self, prefill: Instance) -> None:
        """A leg on it was lost or refused; the exchange goes on as it always does."""

    def prefilled(self, leg: Leg) -> None:
        """`leg` holds the prefill engine's complete answer. The decode engine has or gets the KV."""

    def start(self) -> None:
        try:
            self.fields = read_fields(self.request.body)
        except msgspec.DecodeError as error:
            self.give_up(400, f"the request body cannot be read as a JSON object: {error}")
            return
        problem = self.unservable()
        if problem:
            self.give_up(400, problem)
            return
        now = self.now()
        decision = self.schedule_pair(now)
        if self.accept(decision, now):
            self._send_pair(decision, now)

    def schedule_pair(self, now: float) -> Decision:
        services = self.services
        decision = services.scheduler.schedule(self.view, services.cluster.view(now), now)
        if decision.reject is None and decision.prefill is None:
            return self.without_prefill(decision)
        return decision

    def _send_pair(self, decision: Decision, now: float) -> None:
        assert decision.decode is not None
        if decision.prefill is None:
            self.services.metrics.decode_only += 1
            self._decode_body = self.request.body
        else:
            instance = self.services.cluster.instances[decision.prefill.instance_id]
            bodies = self.bodies(instance)
            self._decode_body = bodies.decode
            self._prefill = prefill = _PrefillLeg(self, instance)
            prefill.leg = self.send(prefill, decision.prefill, bodies.prefill, now, bodies.prefill_lines)
        self.send_answer(decision.decode, now)

    def answer_body(self) -> bytes:
        return self._decode_body

    def send_answer(self, state: InstanceState, now: float) -> None:
        self._silent = None
        super().send_answer(state, now)

    def leg_head(self, leg: Leg) -> None:
        if self._prefill is not None and leg.status < 300 and leg.is_silent_stream:
            self._silent = leg
            leg.on_data = self._first_data
            return
        super().leg_head(leg)

    def _first_data(self, data: bytes) -> None:
        leg = self._silent
        if leg is not None:
            leg.hold(data)
            self._pass_silent()

    def _pass_silent(self) -> None:
        leg, self._silent = self._silent, None
        if leg is not None:
            super().leg_head(leg)

    def leg_ended(self, leg: Leg) -> None:
        self._pass_silent()
        super().leg_ended(leg)

    def leg_lost(self, leg: Leg) -> None:
        self._silent = None
        super().leg_lost(leg)

    def _retry_answer(self, leg: Leg, reason: str, now: float) -> bool:
        """The decode leg failed: its partner is of no use any more."""
        assert self._instance is not None
        self.exclude(self._instance)
        if not self._send_another_pair("answer", reason, now):
            return False
        leg.cancel()
        return True

    def _send_another_pair(self, leg_name: str, reason: str, now: float) -> bool:
        decision = self.schedule_pair(now)
        if decision.reject is not None or not self.may_retry(now):
            return False
        self.services.metrics.retries[leg_name, reason] += 1
        self._cancel_prefill()
        self.resent(decision, now)
        self._send_pair(decision, now)
        return True

    def _cancel_prefill(self) -> None:
        prefill, self._prefill = self._prefill, None
        if prefill is not None:
            prefill.cancel()

    def prefill_over(self, prefill: "_PrefillLeg", leg: Leg, reason: str) -> None:
        """It ended in whatever way."""
        now = self.now()
        status = leg.status
        if not leg.failure and status < 300:
            prefill.instance.breaker.succeeded()
            self.prefilled_at(now)
            self.prefilled(leg)
            self._prefill = None
            self._pass_silent()
            return
        self.prefill_failed(prefill.instance)
        is_bad_request = not leg.failure and 400 <= status < 500 and status != 429
        if not is_bad_request:
            if status != 429:
                prefill.instance.breaker.failed(now)
            self.log_failure(prefill.instance, leg.failure or f"answered {status}")
        decode_leg, decode_instance = self._answer, self._instance
        if self.has_answer or self.is_over:
            if decode_leg is not None and self._meter is not None and not self._meter.num_events:
                # All that the client has seen are comments, and no more would come.
                self.services.metrics.leg_over(decode_instance, "cancelled")
                failure = leg.failure or f"answered {status}"
                self._break_off(decode_leg, f"the prefill engine {failure}")
                decode_leg.cancel()
            return
        if is_bad_request:
            self.pass_on(leg)
            return
        self.exclude(prefill.instance)
        if self._send_another_pair("prefill", reason, now):
            if decode_leg is not None:
                self.services.metrics.leg_over(decode_instance, "cancelled")
                decode_leg.cancel()
        elif leg.failure:
            self.cancel_answer()
            self.give_up(502, f"the prefill engine at {prefill.instance.url} {leg.failure}")
        else:
            self.pass_on(leg)

    def settled(self, status: int) -> None:
        self._silent = None
        prefill, self._prefill = self._prefill, None
        if prefill is None:
            return
        if status >= 400:
            prefill.cancel()
        elif prefill.leg is not None:
            self._loop.call_later(LINGER_S, prefill.cancel)


class _PrefillLeg:
    """Its answer is held: only whether it came matters."""

    def __init__(self, exchange: PairExchange, instance: Instance) -> None:
        self._exchange = exchange
        self.instance = instance
        self.leg: Leg | None = None

    def cancel(self) -> None:
        leg, self.leg = self.leg, None
        if leg is not None:
            self._exchange.services.metrics.leg_over(self.instance, "cancelled")
            leg.cancel()

    def leg_head(self, leg: Leg) -> None:
        pass

    def leg_ended(self, leg: Leg) -> None:
        self.leg = None
        self._exchange.services.metrics.leg_over(self.instance, leg.status)
        self._exchange.prefill_over(self, leg, str(leg.status))

    def leg_lost(self, leg: Leg) -> None:
        self.leg = None
        self._exchange.services.metrics.leg_over(self.instance, "lost")
        self._exchange.prefill_over(self, leg, "lost")
