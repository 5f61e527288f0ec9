"""vLLM's NixlConnector: first the prefill, then the decode, with what the prefill engine said in between.

vLLM 0.32 (vllm/distributed/kv_transfer/kv_connector/v1/nixl): the prefill engine keeps the blocks for a lease
(30 s) and answers with `kv_transfer_params`, which the decode engine needs, whole and unread: keys keep being
added. The decode leg goes out as soon as they are here. Where there are none (the prefill ended by a stop
token, or no prefill instance is left) the decode engine computes the prompt itself.

- A decode engine that fails is replaced by another with the same parameters: the KV is still there.
- A client that leaves closes the leg that is open; a prefill nobody fetched is freed when its lease ends.
"""

from typing import Any

import msgspec

from router.core.view import InstanceState, RequestView
from router.http.leg import Leg, decode_body
from router.http.request import Request
from router.http.server import ClientConnection
from router.protocols.base import Services
from router.protocols.bodies import (
    prefill_fields,
    with_field,
    with_transfer_params,
    write_fields,
)
from router.protocols.prefill import Prefill, PrefillFailure
from router.protocols.prefilled import PrefilledExchange

_PREFILL_PARAMS: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class _Details(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens_details: _Details | None = None


class _PrefillAnswer(msgspec.Struct, frozen=True):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")
    usage: _Usage | None = None


_ANSWER = msgspec.json.Decoder(_PrefillAnswer)


class NixlExchange(PrefilledExchange):
    def __init__(
        self, services: Services, client: ClientConnection, request: Request, view: RequestView
    ) -> None:
        super().__init__(services, client, request, view)
        self._params: msgspec.Raw | None = None

    def dispatch(self, prefill: InstanceState | None, decode: InstanceState, now: float) -> None:
        if prefill is None:
            self.send_answer(decode, now)
            return
        fields = prefill_fields(self._fields)
        for name, value in _PREFILL_PARAMS.items():
            fields = with_transfer_params(fields, name, value)
        self._prefill = Prefill(self, self, write_fields(fields))
        self._prefill.start(prefill, now)

    def answer_body(self) -> bytes:
        if self._params is None:
            return self.request.body
        return write_fields(with_field(self._fields, "kv_transfer_params", self._params))

    # PrefillListener

    def prefilled(self, leg: Leg) -> None:
        services, now = self.services, self.now()
        services.cluster.book.first_token(self.view.request_id, now)
        answer = _read_answer(leg)
        if answer is None or bytes(answer.kv_transfer_params) == b"null":
            services.metrics.decode_only += 1
        else:
            self._params = answer.kv_transfer_params
        if answer is not None and answer.usage is not None and answer.usage.prompt_tokens_details is not None:
            # The decode engine calls the whole prompt cached (vllm-project/router#193).
            cached = answer.usage.prompt_tokens_details.cached_tokens or 0
            self.extra_lines += b"x-mooncake-prefill-cached-tokens: %d\r\n" % cached
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
        view = services.cluster.view(now)
        wanted = self._decode_state.instance_id if self._decode_state is not None else ""
        state = next((one for one in view.decode if one.instance_id == wanted), None)
        if state is None:
            decision = self.schedule_again(now)
            if decision.decode is None:
                self.reject(decision.reject)
                return
            self.resent(decision, now)
            state = decision.decode
        rejection = services.scheduler.after_prefill(self.view, state, view, now)
        if rejection is not None:
            self.reject(rejection)
            return
        self.send_answer(state, now)

    def settled(self, status: int) -> None:
        if self._prefill is not None:
            self._prefill.cancel()

    def sweep(self, now: float) -> None:
        if self._prefill is not None and self._prefill.is_running and self.is_late(now):
            self.give_up(504, f"the prefill took longer than {self.timeout_text}")
            return
        super().sweep(now)


def _read_answer(leg: Leg) -> _PrefillAnswer | None:
    if leg.truncated:
        return None
    try:
        return _ANSWER.decode(decode_body(leg.held_response()))
    except msgspec.DecodeError:
        return None
