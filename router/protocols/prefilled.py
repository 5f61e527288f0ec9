"""What the protocols have in common whose prefill leg is a short request of its own: the answering leg can be
sent again to another decode engine, whatever became of the prefill."""

import msgspec

from router.core.decision import Decision
from router.core.view import InstanceState, RequestView
from router.http.request import Request
from router.http.server import ClientConnection
from router.protocols.base import Exchange, Services
from router.protocols.bodies import Fields, read_fields
from router.protocols.prefill import Prefill


class PrefilledExchange(Exchange):
    """A protocol says in `dispatch` what is sent, and when."""

    reports_prefill_cache = True

    def __init__(
        self, services: Services, client: ClientConnection, request: Request, view: RequestView
    ) -> None:
        super().__init__(services, client, request, view)
        self._fields: Fields = {}
        self._prefill: Prefill | None = None
        self._decode_state: InstanceState | None = None

    def may_be_prefilled(self) -> bool:
        """Whether an answer to this body can begin with what a prefill engine has computed."""
        return True

    def dispatch(self, prefill: InstanceState | None, decode: InstanceState, now: float) -> None:
        """Both were chosen. None: there is no instance to prefill, and the decode engine does both."""
        raise AssertionError("a protocol has legs")

    def start(self) -> None:
        try:
            self._fields = read_fields(self.request.body)
        except msgspec.DecodeError as error:
            self.give_up(400, f"the request body cannot be read as a JSON object: {error}")
            return
        if not self.may_be_prefilled():
            self.exclude_prefill()
        now = self.now()
        services = self.services
        decision = services.scheduler.schedule(self.view, services.cluster.view(now), now)
        if not self.accept(decision, now) or decision.decode is None:
            return
        self._decode_state = decision.decode
        if decision.prefill is None:
            services.metrics.decode_only += 1  # slower, but served
        self.dispatch(decision.prefill, decision.decode, now)

    def present_decode(self, now: float) -> InstanceState | None:
        """The decode instance the request is on, as it is now; None when it has left or is down."""
        wanted = self._decode_state.instance_id if self._decode_state is not None else ""
        decode = self.services.cluster.view(now).decode
        return next((one for one in decode if one.instance_id == wanted), None)

    def schedule_again(self, now: float) -> Decision:
        services = self.services
        return services.scheduler.decide_decode(self.view, services.cluster.view(now), now)

    def resent(self, decision: Decision, now: float) -> None:
        assert decision.decode_choice is not None
        self.services.cluster.book.decode_moved(self.view.request_id, decision.decode_choice, now)
