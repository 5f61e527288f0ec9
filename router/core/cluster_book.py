"""The cluster's state between decisions: who is there, what is under way, what the next view shows.

Live router and simulator keep one each and tell it what happens; it never does anything by itself. All
methods are to be called from one thread, with one clock.
"""

from __future__ import annotations

from router.core.decision import Choice, Decision, Transfer
from router.core.forecast import Forecast
from router.core.instance_book import InstanceBook
from router.core.length_history import LengthHistory
from router.core.load_report import LoadReport
from router.core.placement import Placement
from router.core.prefix_index import PrefixIndex
from router.core.settings import Settings
from router.core.view import NO_WORKER, ClusterView, InstanceState, RequestView, Role


class _Member:
    __slots__ = ("book", "is_available", "role")

    def __init__(self, role: Role, book: InstanceBook) -> None:
        self.role = role
        self.book = book
        self.is_available = True


class _Request:
    __slots__ = ("decode_on", "has_begun", "placement", "prefill_on", "view")

    def __init__(
        self, view: RequestView, prefill_on: str, decode_on: str, placement: Placement | None
    ) -> None:
        self.view = view
        self.prefill_on = prefill_on  # "": done, or none
        self.decode_on = decode_on
        self.placement = placement
        self.has_begun = False  # to decode


class ClusterBook:
    def __init__(self, settings: Settings, index: PrefixIndex | None = None) -> None:
        self._settings = settings
        self._index = index
        self.history = LengthHistory(settings.expected_output_tokens)
        self.forecast = Forecast(self.history)
        self._members: dict[str, _Member] = {}
        self._requests: dict[str, _Request] = {}
        self._transfers: dict[int, int] = {}
        self._worker_of: dict[str, int] = {}

    def configure(self, settings: Settings) -> None:
        """For what comes from now on; what was learned stays."""
        self._settings = settings
        for member in self._members.values():
            member.book.configure(settings.decode_model)

    # ---- members ----------------------------------------------------------------------------------------

    def add_instance(
        self,
        instance_id: str,
        role: Role,
        *,
        kv_capacity_tokens: int = 0,
        is_shared: bool = False,
        store_node: str = "",
    ) -> int:
        """Its worker number in the index. `is_shared`: others can fetch from its local tier; `store_node`:
        the store node on its host, added before."""
        worker = self._add_worker(instance_id, is_shared)
        store_worker = self._worker_of[store_node] if store_node else NO_WORKER
        book = InstanceBook(
            instance_id, worker, store_worker, kv_capacity_tokens, self._settings.decode_model, role
        )
        self._members[instance_id] = _Member(role, book)
        return worker

    def add_store_node(self, node_id: str) -> int:
        return self._add_worker(node_id, True)

    def remove(self, member_id: str) -> None:
        """An instance or a store node. Requests still on it end as usual."""
        self._members.pop(member_id, None)
        worker = self._worker_of.pop(member_id, NO_WORKER)
        if self._index is not None and worker != NO_WORKER:
            self._index.remove_worker(worker)

    def worker_of(self, member_id: str) -> int | None:
        """Its number in the index; None when there is no index or no such member."""
        return self._worker_of.get(member_id)

    def store_node_of(self, instance_id: str) -> str:
        """The id of the store node that an instance reads from as from its own memory; "": none is known."""
        member = self._members.get(instance_id)
        if self._index is None or member is None or member.book.store_worker == NO_WORKER:
            return ""
        return self._index.worker_ids.get(member.book.store_worker, "")

    def set_available(self, instance_id: str, is_available: bool) -> None:
        """Not available: unhealthy, draining, breaker open. Gets no new requests."""
        self._members[instance_id].is_available = is_available

    def polled(self, instance_id: str, report: LoadReport) -> None:
        member = self._members.get(instance_id)
        if member is not None:
            member.book.polled(report, self._settings.prefill_model.per_token_ms)

    def view(self, now: float) -> ClusterView:
        mixed: list[InstanceState] = []
        prefill: list[InstanceState] = []
        decode: list[InstanceState] = []
        for member in self._members.values():
            if member.is_available:
                role = member.role
                pool = mixed if role is Role.MIXED else prefill if role is Role.PREFILL else decode
                pool.append(member.book.state(now))
        return ClusterView(
            tuple(mixed),
            tuple(prefill),
            tuple(decode),
            self._index,
            self.forecast,
            self._index.worker_ids if self._index is not None else {},
            self._transfers,
        )

    def look(self, now: float) -> dict[str, InstanceState]:
        """Every instance, available or not, for people and metrics; decisions are made from `view`."""
        return {instance_id: member.book.look(now) for instance_id, member in self._members.items()}

    # ---- requests ---------------------------------------------------------------------------------------

    def sent(self, request: RequestView, decision: Decision, now: float) -> None:
        """A decision was carried out. When the request is sent anew, `ended` comes first."""
        prefiller = decision.prefill or decision.decode
        assert prefiller is not None and decision.decode is not None
        expected = 0.0
        if request.prompt_tokens:  # else nobody predicts anything from it: 2 us less a request
            expected = self.history.expected_tokens(request.tenant, request.prompt_tokens, request.max_tokens)
        done_at, placement = now, None
        choice = decision.prefill_choice
        if choice is not None:
            done_at, placement = self._prefill_sent(request, prefiller, choice, now)
        self._decode_sent(request, decision.decode, int(expected), now)
        if expected:
            self.forecast.add(
                request.request_id, done_at, request.prompt_tokens + expected / 2, expected, decision.tbt_ms
            )
        prefill_on = prefiller.instance_id if choice is not None else ""
        self._requests[request.request_id] = _Request(
            request, prefill_on, decision.decode.instance_id, placement
        )

    def prefill_moved(self, request_id: str, choice: Choice, now: float) -> None:
        """The prefill failed and goes to another instance; the decode stays where it is."""
        request = self._requests.get(request_id)
        if request is None or choice.instance is None:
            return
        self._end_prefill(request_id, request, now, completed=False)
        _, request.placement = self._prefill_sent(request.view, choice.instance, choice, now)
        request.prefill_on = choice.instance.instance_id

    def decode_moved(self, request_id: str, choice: Choice, now: float) -> None:
        """The decode leg failed and goes to another instance; the prefill stays where it is."""
        request = self._requests.get(request_id)
        if request is None or choice.instance is None:
            return
        if (member := self._members.get(request.decode_on)) is not None:
            member.book.decode_ended(request_id, now, 0)
        view = request.view
        expected = self.history.expected_tokens(view.tenant, view.prompt_tokens, view.max_tokens)
        self._decode_sent(view, choice.instance, int(expected), now)
        request.decode_on, request.has_begun = choice.instance.instance_id, False

    def first_token(self, request_id: str, now: float) -> None:
        """The prefill is done and decoding has begun."""
        request = self._requests.get(request_id)
        if request is None:
            return
        self._end_prefill(request_id, request, now, completed=True)
        request.has_begun = True
        if (member := self._members.get(request.decode_on)) is not None:
            member.book.decode_started(request_id, now)
        self.forecast.started(request_id, now)

    def prefill_failed(self, request_id: str, now: float) -> None:
        """Its prefill leg ended without result; the decode instance computes it all."""
        request = self._requests.get(request_id)
        if request is not None:
            self._end_prefill(request_id, request, now, completed=False)

    def ended(self, request_id: str, now: float, output_tokens: int = 0, *, completed: bool = False) -> None:
        """However it ended. `output_tokens`: of a complete answer only; 0 teaches nothing about lengths.
        `completed`: the answer was complete, so its prefix is there, whatever was seen of it before."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        if completed and self._index is not None and request.placement is not None:
            self._index.placed(request.placement, now, True)
            request.placement = None
        self._end_prefill(request_id, request, now, completed=False)
        if (member := self._members.get(request.decode_on)) is not None:
            # Of an answer that was not streamed nobody saw the first token: its time says nothing of TBT.
            member.book.decode_ended(request_id, now, output_tokens if request.has_begun else 0)
        if output_tokens:
            self.history.observe(request.view.tenant, request.view.prompt_tokens, output_tokens)
            self.forecast.finished(request_id, now)
        else:
            self.forecast.remove(request_id)

    def transfer_started(self, transfer: Transfer) -> None:
        worker = self._worker_of.get(transfer.source, NO_WORKER)
        self._transfers[worker] = self._transfers.get(worker, 0) + 1

    def transfer_ended(self, transfer: Transfer) -> None:
        worker = self._worker_of.get(transfer.source, NO_WORKER)
        remaining = self._transfers.get(worker, 0) - 1
        if remaining > 0:
            self._transfers[worker] = remaining
        else:
            self._transfers.pop(worker, None)

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    def _prefill_sent(
        self, request: RequestView, target: InstanceState, choice: Choice, now: float
    ) -> tuple[float, Placement | None]:
        """When it should be done, and the prefix the instance will then hold."""
        member = self._members.get(target.instance_id)
        if member is None:
            return now, None
        model_ms = choice.compute_ms / target.prefill_scale
        done_at = member.book.prefill_sent(request.request_id, model_ms, now)
        if self._index is None or member.book.worker == NO_WORKER or not request.block_hashes:
            return done_at, None
        return done_at, self._index.place(member.book.worker, request.block_hashes, now, done_at)

    def _decode_sent(
        self, request: RequestView, target: InstanceState, expected_tokens: int, now: float
    ) -> None:
        if (member := self._members.get(target.instance_id)) is not None:
            kv_tokens = request.prompt_tokens + expected_tokens
            mean_kv_tokens = request.prompt_tokens + expected_tokens / 2
            member.book.decode_sent(request.request_id, kv_tokens, mean_kv_tokens, now)

    def _end_prefill(self, request_id: str, request: _Request, now: float, completed: bool) -> None:
        if request.prefill_on and (member := self._members.get(request.prefill_on)) is not None:
            member.book.prefill_ended(request_id, now, completed)
        if self._index is not None and request.placement is not None:
            self._index.placed(request.placement, now, completed)
        request.prefill_on, request.placement = "", None

    def _add_worker(self, member_id: str, is_shared: bool) -> int:
        if self._index is None:
            return NO_WORKER
        worker = self._index.add_worker(member_id, is_shared)
        self._worker_of[member_id] = worker
        return worker
