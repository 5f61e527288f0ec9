"""Our own P/D protocol: both legs at once, KV through the store.

The decode engine does not wait for the prefill engine's answer: its connector follows the layers in the store
as the prefill engine commits them (design: "layer-wise streaming"). So the prefill leg is only watched:

- it ends well: nothing to do, its answer is dropped;
- the engine calls the request bad (4xx but 429): the decode leg is cancelled, the client gets that error;
- another instance is left: it is tried, the decode engine goes on following (keys are content hashes);
- none is left and the engine answered 5xx: its connector has given up its keys in the store, so the decode
  engine has been told and computes the prompt itself;
- none is left and the engine never took the request (unreachable, killed, 429, 503): nobody will give up keys
  nobody has reserved, so the decode leg is sent again without a prefill to wait for.
"""

from router.core.view import InstanceState, RequestView
from router.http.leg import Leg
from router.http.request import Request
from router.http.server import ClientConnection
from router.protocols.base import Services
from router.protocols.bodies import Fields, prefill_fields, with_transfer_params, write_fields
from router.protocols.prefill import LINGER_S, Prefill, PrefillFailure
from router.protocols.prefill_answer import read_prefill_answer
from router.protocols.prefilled import PrefilledExchange

PARAMS = "mooncake_pd"


class SuiteExchange(PrefilledExchange):
    def __init__(
        self, services: Services, client: ClientConnection, request: Request, view: RequestView
    ) -> None:
        super().__init__(services, client, request, view)
        self._transfer_id = services.ids.next_id()

    def dispatch(self, prefill: InstanceState | None, decode: InstanceState, now: float) -> None:
        if prefill is not None:
            self._prefill = Prefill(self, self, self._body_for("prefill", prefill_fields(self._fields)))
            self._prefill.start(prefill, now)
        self.send_answer(decode, now)

    def answer_body(self) -> bytes:
        return self.request.body if self._prefill is None else self._body_for("decode", self._fields)

    def send_answer(self, state: InstanceState, now: float) -> None:
        self._decode_state = state
        super().send_answer(state, now)

    def _body_for(self, role: str, fields: Fields) -> bytes:
        """Equal transfer ids belong together; a decode engine waits at most `wait_ms` for each of the prefill
        engine's layers."""
        wait_ms = self.services.config.pd_wait_ms
        params = {"role": role, "transfer_id": self._transfer_id, "wait_ms": wait_ms}
        return write_fields(with_transfer_params(fields, {PARAMS: params}))

    # PrefillListener

    def prefilled(self, leg: Leg) -> None:
        services, now = self.services, self.now()
        self.prefilled_at(now)
        self.prefill_cached = read_prefill_answer(leg).cached_tokens
        if self.has_answer:
            return
        state = self.present_decode(now)
        if state is None:
            return
        rejection = services.scheduler.after_prefill(self.view, state, services.cluster.view(now), now)
        if rejection is not None:
            self.cancel_answer()
            self.reject(rejection)

    def prefill_failed(self, failure: PrefillFailure, leg: Leg) -> None:
        if self.has_answer:
            return
        if failure is PrefillFailure.BAD_REQUEST:
            self.pass_on(leg)
            return
        now = self.now()
        self.services.metrics.decode_only += 1
        self.services.cluster.book.prefill_failed(self.view.request_id, now)
        if failure is not PrefillFailure.NEVER_RAN:
            return
        state = self.present_decode(now)
        if state is None:
            decision = self.schedule_again(now)
            if decision.decode is None:
                return  # the leg goes on, on an engine that leaves: it waits its time and computes it all
            self.resent(decision, now)
            state = decision.decode
        self._prefill = None
        self.cancel_answer()
        self.send_answer(state, now)

    def settled(self, status: int) -> None:
        prefill, self._prefill = self._prefill, None  # it refers to this exchange: see _settle
        if prefill is None or not prefill.is_running:
            return
        if status >= 400:
            prefill.cancel()
        else:
            self._loop.call_later(LINGER_S, prefill.cancel)
