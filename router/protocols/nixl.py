"""vLLM's NixlConnector: first the prefill, then the decode, with what the prefill engine said in between.

vLLM 0.32 (vllm/distributed/kv_transfer/kv_connector/v1/nixl): the prefill engine keeps the blocks for a lease
(30 s) and answers with `kv_transfer_params`, which the decode engine needs, whole and unread: keys keep being
added. The decode leg goes out as soon as they are here. Where there are none (the prefill ended by a stop
token, or no prefill instance is left) the decode engine computes the prompt itself.

- A decode engine that never looked at the request (429, 503) is replaced by another with the same parameters:
  the KV is still there. One that failed otherwise may have fetched it, and then the prefill engine has freed
  its blocks: whoever read them again would decode somebody else's. So the next one computes the prompt
  itself, and so does one that is asked when the lease may be over (vLLM only logs late reads).
- A client that leaves closes the leg that is open; a prefill nobody fetched is freed when its lease ends.
- Several prompts in one body, or several samples (`n`), are for the decode engine alone. The prefill engine
  answers with the parameters of the first prompt only (completion/serving.py: final_res_batch[0]), and the
  decode engine would take that one's KV for every prompt; samples would each fetch the same blocks, which are
  free after the first.
"""

from typing import Any

import msgspec

from router.core.view import InstanceState, RequestView
from router.http.leg import Leg
from router.http.request import Request
from router.http.server import ClientConnection
from router.protocols.base import Services
from router.protocols.bodies import (
    num_sequences,
    prefill_fields,
    with_field,
    with_transfer_params,
    write_fields,
)
from router.protocols.prefill import Prefill, PrefillFailure
from router.protocols.prefill_answer import read_prefill_answer
from router.protocols.prefilled import PrefilledExchange

_PREFILL_PARAMS: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


# Well below vLLM's kv_lease_duration, of which heartbeats of a decode engine are the first to know.
PARAMS_VALID_S = 20.0


class NixlExchange(PrefilledExchange):
    def __init__(
        self, services: Services, client: ClientConnection, request: Request, view: RequestView
    ) -> None:
        super().__init__(services, client, request, view)
        self._params: msgspec.Raw | None = None
        self._prefilled_at = 0.0

    def may_be_prefilled(self) -> bool:
        return num_sequences(self._fields) == 1

    def dispatch(self, prefill: InstanceState | None, decode: InstanceState, now: float) -> None:
        if prefill is None:
            self.send_answer(decode, now)
            return
        body = write_fields(with_transfer_params(prefill_fields(self._fields), _PREFILL_PARAMS))
        self._prefill = Prefill(self, self, body)
        self._prefill.start(prefill, now)

    def answer_body(self) -> bytes:
        if self._params is not None and self.now() - self._prefilled_at > PARAMS_VALID_S:
            self._forget_prefill()
        if self._params is None:
            return self.request.body
        return write_fields(with_field(self._fields, "kv_transfer_params", self._params))

    def _retry_answer(self, leg: Leg, reason: str, now: float) -> bool:
        if leg.status not in (429, 503):
            self._forget_prefill()
        return super()._retry_answer(leg, reason, now)

    def _forget_prefill(self) -> None:
        if self._params is not None:
            self._params, self.prefill_cached = None, None
            self.services.metrics.decode_only += 1

    # PrefillListener

    def prefilled(self, leg: Leg) -> None:
        services, now = self.services, self.now()
        self.prefilled_at(now)
        answer = read_prefill_answer(leg)
        if answer.has_params:
            self._params, self._prefilled_at = answer.kv_transfer_params, now
        else:
            services.metrics.decode_only += 1
        if answer.cached_tokens is not None:
            self.extra_lines += b"x-mooncake-prefill-cached-tokens: %d\r\n" % answer.cached_tokens
            if answer.has_params:
                self.prefill_cached = answer.cached_tokens
        self._decode(now)

    def prefill_failed(self, failure: PrefillFailure, leg: Leg) -> None:
        if failure is PrefillFailure.BAD_REQUEST:
            self.pass_on(leg)
            return
        now = self.now()
        self.services.metrics.decode_only += 1
        self.services.cluster.book.prefill_failed(self.view.request_id, now)
        self._decode(now)

    def _decode(self, now: float) -> None:
        """To the instance chosen at arrival or, if that has gone meanwhile, to another."""
        services = self.services
        state = self.present_decode(now)
        if state is None:
            decision = self.schedule_again(now)
            if decision.decode is None:
                self.reject(decision.reject)
                return
            self.resent(decision, now)
            state = decision.decode
        rejection = services.scheduler.after_prefill(self.view, state, services.cluster.view(now), now)
        if rejection is not None:
            self.reject(rejection)
            return
        self.send_answer(state, now)

    def settled(self, status: int) -> None:
        prefill, self._prefill = self._prefill, None  # it refers to this exchange: see _settle
        if prefill is not None:
            prefill.cancel()

    def sweep(self, now: float) -> None:
        if self._prefill is not None and self._prefill.is_running and self.is_late(now):
            self.give_up(504, f"the prefill took longer than {self.timeout_text}")
            return
        super().sweep(now)
