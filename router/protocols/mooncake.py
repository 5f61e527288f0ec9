"""vLLM's MooncakeConnector: both legs at once, under a transfer id that the router makes.

vLLM 0.28 to 0.32 (mooncake_connector.py): the decode engine fetches the KV from the prefill engine, which it
finds by `remote_bootstrap_addr` and `remote_engine_id` (router/bootstrap.py); whichever leg comes first waits
for the other. It waits long (VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT, 480 s), so:

- a prefill that fails closes the decode leg at once; the next try is a new pair under a new id;
- a decode engine that never looked at the request (429, 503) is replaced: the prefill engine still has the
  KV under the same id. One that failed otherwise may have fetched it, so then it is a new pair;
- several prompts in one body, or several samples (`n`), are for the decode engine alone: they would all be
  fetched under the one id, whose KV is one prompt's and is there once;
- with no prefill engine left, or none whose bootstrap server answers, the decode engine computes it all.
"""

import secrets

from router.core.decision import Decision
from router.core.view import RequestView
from router.http.leg import Leg
from router.http.request import Request
from router.http.server import ClientConnection
from router.instance import Instance
from router.instance_spec import RANK_HEADER, read_rank
from router.protocols.base import Services
from router.protocols.bodies import (
    num_sequences,
    prefill_fields,
    with_transfer_params,
    write_fields,
)
from router.protocols.pair import PairBodies, PairExchange
from router.protocols.prefill_answer import read_prefill_answer


class MooncakeExchange(PairExchange):
    reports_prefill_cache = True

    def __init__(
        self, services: Services, client: ClientConnection, request: Request, view: RequestView
    ) -> None:
        super().__init__(services, client, request, view)
        self._prefill_instance: Instance | None = None

    def schedule_pair(self, now: float) -> Decision:
        cluster, bootstrap = self.services.cluster, self.services.bootstrap
        if num_sequences(self.fields) > 1:
            self.exclude_prefill()
        while True:
            decision = super().schedule_pair(now)
            if decision.reject is not None or decision.prefill is None:
                return decision
            instance = cluster.instances[decision.prefill.instance_id]
            if bootstrap.server_of(instance) is not None:
                return decision
            self.exclude(instance)

    def without_prefill(self, decision: Decision) -> Decision:
        self._prefill_instance, self.prefill_cached = None, None
        return decision

    def bodies(self, prefill: Instance) -> PairBodies:
        server = self.services.bootstrap.server_of(prefill)
        assert server is not None
        self._prefill_instance, self.prefill_cached = prefill, None
        transfer_id = f"xfer-{self.services.ids.next_id()}"
        rank, lines = self._rank(prefill, list(server.engine_ids))
        prefill_params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
        decode_params = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_bootstrap_addr": server.address,
            "remote_engine_id": server.engine_ids[rank],
            "transfer_id": transfer_id,
        }
        return PairBodies(
            write_fields(with_transfer_params(prefill_fields(self.fields), prefill_params)),
            write_fields(with_transfer_params(self.fields, decode_params)),
            lines,
        )

    def _rank(self, prefill: Instance, ranks: list[int]) -> tuple[int, bytes]:
        """The rank that prefills, and the header line that sends it there where nothing else does."""
        if prefill.spec.dp_rank in ranks:
            return prefill.spec.dp_rank, b""  # its head lines say so
        if len(ranks) == 1:
            return ranks[0], b""
        asked = read_rank(self.request.headers.get(RANK_HEADER, b""))
        if asked in ranks:
            return asked, b""  # the client's own line is forwarded
        rank = secrets.choice(ranks)
        return rank, b"%b: %d\r\n" % (RANK_HEADER, rank)

    def prefilled(self, leg: Leg) -> None:
        self.prefill_cached = read_prefill_answer(leg).cached_tokens

    def prefill_failed(self, prefill: Instance) -> None:
        self.services.bootstrap.ask_again(prefill)

    def _retry_answer(self, leg: Leg, reason: str, now: float) -> bool:
        if leg.status not in (429, 503):
            if self._prefill_instance is not None:
                self.services.bootstrap.ask_again(self._prefill_instance)
            return super()._retry_answer(leg, reason, now)
        assert self._instance is not None
        self.exclude(self._instance)
        services = self.services
        decision = services.scheduler.decide_decode(self.view, services.cluster.view(now), now)
        if decision.decode is None or decision.decode_choice is None or not self.may_retry(now):
            return False
        services.metrics.retries["answer", reason] += 1
        leg.cancel()
        services.cluster.book.decode_moved(self.view.request_id, decision.decode_choice, now)
        self.send_answer(decision.decode, now)
        return True
