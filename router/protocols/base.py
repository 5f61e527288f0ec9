"""One client request on its way through the cluster: the leg that answers it, with retries.

Every way of serving (no P/D, and each P/D protocol) is an `Exchange`: it has exactly one leg that answers the
client, and may have others beside it. Nothing here awaits; events come from the connections.
"""

import logging
import math
from collections.abc import Callable
from typing import Protocol

from msgspec.structs import replace

from router import decisions
from router.bootstrap import BootstrapDirectory
from router.cluster import Cluster
from router.config import RouterConfig
from router.core.decision import Decision, Rejection, RejectReason
from router.core.scheduler import Scheduler
from router.core.view import InstanceState, RequestView, Role
from router.dashboard.watch import Watch
from router.http.answer_meter import AnswerMeter, count_output_tokens
from router.http.cached_tokens import CachedTokensFilter
from router.http.leg import Leg, LegOwner, LegState
from router.http.request import Request, upstream_head
from router.http.response import Response, error_response, stream_error_event
from router.http.server import ClientConnection
from router.ids import IdSource
from router.instance import Instance
from router.metrics import RouterMetrics
from router.prefetch import Prefetcher
from router.prefix_copies import PrefixCopier
from router.protocols.transferring import PrefixTransfer
from router.request_view import GENERATES

logger = logging.getLogger(__name__)


class Services(Protocol):
    """What an exchange needs of the router. One event loop, one thread."""

    config: RouterConfig
    cluster: Cluster
    scheduler: Scheduler
    metrics: RouterMetrics
    ids: IdSource
    decisions: decisions.DecisionLog
    bootstrap: BootstrapDirectory
    prefetcher: Prefetcher
    copier: PrefixCopier
    watch: Watch


class Exchange:
    """The answering leg. Without a subclass: the whole request goes to one instance (no P/D).

    `view` carries our own id of the request. Over, for whatever reason, exactly when `_settle` was called.
    """

    # Whether the answer comes from an engine that takes what another has computed for a cache hit.
    reports_prefill_cache = False

    def __init__(
        self, services: Services, client: ClientConnection, request: Request, view: RequestView
    ) -> None:
        self.services = services
        self.request = request
        self.view = view
        self._client = client
        self._loop = client.loop
        self._started_at = self._loop.time()
        self._deadline = self._started_at + services.config.request_timeout_ms / 1e3
        self._first_byte_at = 0.0
        self._first_token_at = 0.0
        self._retries = 0
        self._retry_after = b""
        self.is_over = False
        self.extra_lines = b""  # of the response head, ours
        self.prefill_cached: int | None = None  # tokens, as a prefill engine said it
        self._filter: CachedTokensFilter | None = None
        self._transfer = PrefixTransfer(services)
        self._answer: Leg | None = None
        self._instance: Instance | None = None
        self._meter: AnswerMeter | None = None
        # A client's own id is for people: clients repeat theirs, the book's must be unique.
        shown_id = request.headers.get(b"x-request-id") or view.request_id.encode()
        self.shown_id = shown_id.decode("latin-1")
        self._id_line = b"x-request-id: %b\r\n" % shown_id
        # A client's own line is forwarded as it came.
        self._forwarded_id_line = b"" if b"x-request-id" in request.headers else self._id_line
        services.metrics.active_requests += 1

    # Steps a protocol may replace

    def start(self) -> None:
        now = self._loop.time()
        decision = self.schedule(now)
        if self.accept(decision, now) and decision.decode is not None:
            self.send_answer(decision.decode, now)

    def accept(self, decision: Decision, now: float) -> bool:
        """Books a decision; False when it is a rejection, which is then answered, or the request is held, for
        room or for its prefix to be copied, and starts anew later."""
        self.services.decisions.note(self.shown_id, self.view.prompt_tokens, decision)
        if decision.hold_ms and now + decision.hold_ms / 1e3 < self._deadline:
            self.services.metrics.holds += 1
            self._loop.call_later(decision.hold_ms / 1e3, self._ask_again)
            return False
        if self._transfer.holds(self.view, decision, self._ask_again):
            return False
        self.services.watch.decided(self.view, decision)
        if decisions.REQUEST_HEADER in self.request.headers:
            self.extra_lines += decisions.header_line(self.view.prompt_tokens, decision)
        if decision.reject is not None or decision.decode is None:
            self.reject(decision.reject)
            return False
        self.services.cluster.book.sent(self.view, decision, now)
        self._transfer.begin(self.view, decision.transfer)
        return True

    def _ask_again(self) -> None:
        if not self.is_over:  # the client may have left
            self.view = replace(self.view, waited_ms=(self._loop.time() - self._started_at) * 1e3)
            self.start()

    def answer_body(self) -> bytes:
        """The body the answering instance gets."""
        return self.request.body

    def settled(self, status: int) -> None:
        """The request is over: the client has `status`, or 499 when it left before."""

    # The answering leg

    @property
    def has_answer(self) -> bool:
        """Bytes of an answer have gone to the client: from here on nothing can be tried again."""
        return self._first_byte_at > 0.0

    @property
    def timeout_text(self) -> str:
        return f"{self.services.config.request_timeout_ms / 1e3:g} s"

    def is_late(self, now: float) -> bool:
        return now >= self._deadline

    def now(self) -> float:
        return self._loop.time()

    def schedule(self, now: float) -> Decision:
        services = self.services
        view = services.cluster.view(now)
        if self.request.path in GENERATES and not services.cluster.separates_prefill:
            return services.scheduler.schedule(self.view, view, now)
        # No prompt to prefill elsewhere: any engine that answers clients will do.
        return services.scheduler.decide_decode(self.view, view, now)

    def schedule_again(self, now: float) -> Decision:
        """Another instance for the answering leg."""
        return self.schedule(now)

    def resent(self, decision: Decision, now: float) -> None:
        """The answering leg moves as `schedule_again` said."""
        book = self.services.cluster.book
        book.ended(self.view.request_id, now)
        self._transfer.end()
        book.sent(self.view, decision, now)
        self._transfer.begin(self.view, decision.transfer)

    def prefilled_at(self, now: float) -> None:
        """The prompt has been computed, wherever that was."""
        self.services.cluster.book.first_token(self.view.request_id, now)
        self._transfer.end()

    def send(
        self, owner: LegOwner, state: InstanceState, body: bytes, now: float, extra_lines: bytes = b""
    ) -> Leg:
        """A leg to the instance with the client's head, these lines after it, and this body."""
        instance = self.services.cluster.instances[state.instance_id]
        leg = Leg(owner, instance)
        head = upstream_head(
            self.request, instance.head_lines, self._forwarded_id_line + extra_lines, len(body)
        )
        leg.start(head, body, now)
        return leg

    def send_answer(self, state: InstanceState, now: float) -> None:
        self._instance = self.services.cluster.instances[state.instance_id]
        self._answer = self.send(self, state, self.answer_body(), now)

    def leg_head(self, leg: Leg) -> None:
        assert self._instance is not None
        now = self._loop.time()
        status = leg.status
        if status >= 500 or status == 429:
            self._retry_after = leg.header(b"retry-after") or self._retry_after
            if status >= 500:
                self._instance.breaker.failed(now)
            if self._retry_answer(leg, str(status), now):
                return
        else:
            self._instance.breaker.succeeded()
        self._first_byte_at = now
        self._relay(leg)
        if self._client.write_paused:
            leg.pause()

    def _relay(self, leg: Leg) -> None:
        client = self._client
        extra = self.extra_lines if leg.header(b"x-request-id") else self._id_line + self.extra_lines
        write: Callable[[bytes], object] = client.write
        if self.reports_prefill_cache and leg.header(b"content-encoding") is None:
            self._filter = CachedTokensFilter(write, lambda: self.prefill_cached)
            write = self._filter.write
        if (leg.header(b"content-type") or b"").startswith(b"text/event-stream"):
            self._meter = AnswerMeter(write, self._first_token)
            write = self._meter.write
        if self.request.is_http_1_0:
            leg.relay_body(write, extra)
        else:
            if client.closes_after_response and leg.keep_alive:
                extra += b"connection: close\r\n"
                leg.keep_alive = False
            leg.relay(write, extra)

    def leg_ended(self, leg: Leg) -> None:
        closes = self.request.is_http_1_0 or not leg.keep_alive
        if self._filter is not None:
            self._filter.flush()
        self.services.metrics.leg_over(self._instance, leg.status)
        output_tokens, meter, view = 0, self._meter, self.view
        if leg.status < 300 and (view.prompt_tokens or meter is not None):
            output_tokens = count_output_tokens(leg.last_data, meter.num_events if meter is not None else 0)
            if self._first_token_at:
                slo_ms = view.tbt_slo_ms or self.services.config.scheduling.tbt_slo_ms
                streamed_s = self._loop.time() - self._first_token_at
                self.services.metrics.streamed(streamed_s, output_tokens, slo_ms)
        # Without a prompt's length the length of its answer teaches nothing.
        self._settle(leg.status, output_tokens if view.prompt_tokens else 0)
        self._client.finish(close=closes)

    def _first_token(self) -> None:
        self._first_token_at = now = self._loop.time()
        services, view = self.services, self.view
        slo_ms = view.ttft_slo_ms or services.config.scheduling.ttft_slo_ms
        services.metrics.first_token(now - self._started_at, slo_ms)
        if view.prompt_tokens:
            self.prefilled_at(now)

    def leg_lost(self, leg: Leg) -> None:
        assert self._instance is not None
        now = self._loop.time()
        self._instance.breaker.failed(now)
        self.services.metrics.leg_over(self._instance, "lost")
        self.log_failure(self._instance, leg.failure)
        if self.has_answer:
            self._break_off(leg, f"the engine {leg.failure}")
        elif not self._retry_answer(leg, "lost", now):
            self.give_up(502, f"the engine at {self._instance.url} {leg.failure}")

    def may_retry(self, now: float) -> bool:
        """Whether one more leg may be sent in place of a failed one; counts it."""
        retry = self.services.config.retry
        if self._retries >= retry.max_retries or (now - self._started_at) * 1e3 > retry.budget_ms:
            return False
        self._retries += 1
        return True

    def _retry_answer(self, leg: Leg, reason: str, now: float) -> bool:
        """Sends the request to another instance, if there is one and time left."""
        assert self._instance is not None
        self.exclude(self._instance)
        decision = self.schedule_again(now)
        if decision.reject is not None or decision.decode is None or not self.may_retry(now):
            return False
        self.services.metrics.retries["answer", reason] += 1
        leg.cancel()
        self.resent(decision, now)
        self.send_answer(decision.decode, now)
        return True

    def exclude(self, instance: Instance) -> None:
        self.view = replace(self.view, excluded=self.view.excluded | {instance.url})

    def exclude_prefill(self) -> None:
        """Whoever decodes for this request computes its prompt as well."""
        urls = {url for url, one in self.services.cluster.instances.items() if one.role is Role.PREFILL}
        self.view = replace(self.view, excluded=self.view.excluded | urls)

    def log_failure(self, instance: Instance, reason: str) -> None:
        logger.warning(
            "leg failed",
            extra={"instance": instance.url, "request_id": self.shown_id, "reason": reason},
        )

    def _break_off(self, leg: Leg, reason: str) -> None:
        """An answer that stops in the middle: an error event for a stream, never a false good end."""
        client = self._client
        if self._filter is not None:
            self._filter.flush()
        self._settle(502)
        streams = (leg.header(b"content-type") or b"").startswith(b"text/event-stream")
        chunked = leg.header(b"transfer-encoding") is not None and not self.request.is_http_1_0
        if streams and chunked and leg.header(b"content-encoding") is None and leg.stopped_between_events:
            event = stream_error_event(502, f"the answer is incomplete: {reason}")
            client.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event))
            client.finish(close=True)
        else:
            client.abort()

    # Ends

    def _settle(self, status: int, output_tokens: int = 0) -> None:
        """Once a request, whatever its end. `output_tokens`: of a complete answer, 0 when not counted."""
        self.is_over = True
        now = self._loop.time()
        self.services.metrics.finished(self.request.path, status, self._started_at, self._first_byte_at, now)
        self.services.cluster.book.ended(self.view.request_id, now, output_tokens, completed=status < 300)
        self._transfer.end()
        self.settled(status)
        # They refer to this exchange: cut here, all of a request is freed at once and not by a collector.
        self._answer = self._meter = self._filter = None

    def pass_on(self, leg: Leg) -> None:
        """Answers with the complete response of another leg than the answering one."""
        self.cancel_answer()
        if leg.truncated:
            self.give_up(502, f"an engine answered {leg.status} with more than the router holds")
            return
        self._first_byte_at = self._loop.time()
        self._relay(leg)
        if self._filter is not None:
            self._filter.flush()
        closes = self.request.is_http_1_0 or not leg.keep_alive
        self._settle(leg.status)
        self._client.finish(close=closes)

    def _respond(self, response: Response) -> None:
        self._settle(response.status)
        self._client.respond(replace(response, headers=response.headers + self._id_line + self.extra_lines))

    def give_up(self, status: int, message: str) -> None:
        """The router's own error. An engine's Retry-After survives it."""
        headers = b"retry-after: %b\r\n" % self._retry_after if self._retry_after else b""
        self._respond(error_response(status, message, headers=headers))

    def reject(self, rejection: Rejection | None) -> None:
        """Answers what scheduling refused, with its reason."""
        rejection = rejection or Rejection(RejectReason.NO_INSTANCE)
        self.services.metrics.rejections[rejection.reason.value] += 1
        status = 503 if rejection.reason is RejectReason.NO_INSTANCE else 429
        seconds = math.ceil(rejection.retry_after_ms / 1e3)
        self._respond(
            error_response(
                status,
                rejection.detail or f"rejected: {rejection.reason.value}",
                code=rejection.reason.value,
                headers=b"retry-after: %d\r\n" % seconds if seconds else b"",
            )
        )

    def cancel_answer(self) -> None:
        if self._answer is not None:
            self.services.metrics.leg_over(self._instance, "cancelled")
            self._answer.cancel()

    # What the client's connection calls

    def client_gone(self) -> None:
        self.cancel_answer()
        self.services.metrics.clients_gone += 1
        self._settle(499)

    def client_paused(self) -> None:
        if self._answer is not None and self._answer.state is LegState.RELAYING:
            self._answer.pause()

    def client_resumed(self) -> None:
        if self._answer is not None:
            self._answer.resume()

    def sweep(self, now: float) -> None:
        leg, instance = self._answer, self._instance
        if leg is None or instance is None or not self.is_late(now):
            return
        reason = f"took longer than {self.timeout_text}"
        instance.breaker.failed(now)
        self.services.metrics.leg_over(instance, "timeout")
        self.log_failure(instance, reason)
        if self.has_answer:
            self._break_off(leg, f"the engine {reason}")
        else:
            self.give_up(504, f"the engine at {instance.url} {reason}")
        leg.cancel()
