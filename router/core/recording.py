"""The core's three faces, writing down what goes through them (see core.record).

Not written: load reports of engines, and legs that moved to another instance after a failure. After those a
replay may decide otherwise until the requests concerned have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvcore.wire.events import BlockRemoved, BlockStored, Event
from router.core.cluster_book import ClusterBook
from router.core.decision import Decision, Transfer
from router.core.policies.base import Policy
from router.core.prefix_index import PrefixIndex
from router.core.record import Arrival, Changed, Copying, Line, Member, Progress, Removed, Sent, Stored
from router.core.scheduler import Scheduler
from router.core.settings import Settings
from router.core.view import ClusterView, RequestView, Role

Write = Callable[[Line], None]


class RecordingIndex(PrefixIndex):
    def __init__(
        self,
        block_size_tokens: int,
        max_size_bytes: int = 512 << 20,
        predicted_ttl_s: float = 30.0,
        *,
        write: Write,
    ) -> None:
        super().__init__(block_size_tokens, max_size_bytes, predicted_ttl_s)
        self._write = write

    def apply(self, worker: int, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, BlockStored):
                self._write(
                    Stored(
                        worker,
                        list(event.block_hashes),
                        event.parent_block_hash,
                        list(event.token_ids),
                        event.block_size,
                        event.medium,
                    )
                )
            elif isinstance(event, BlockRemoved):
                self._write(Removed(worker, list(event.block_hashes), event.medium))
        super().apply(worker, events)


class RecordingBook(ClusterBook):
    def __init__(self, settings: Settings, index: PrefixIndex | None, write: Write) -> None:
        super().__init__(settings, index)
        self._write = write

    def add_instance(
        self,
        instance_id: str,
        role: Role,
        *,
        kv_capacity_tokens: int = 0,
        is_shared: bool = False,
        store_node: str = "",
    ) -> int:
        self._write(Member(instance_id, role, kv_capacity_tokens, is_shared, store_node))
        return super().add_instance(
            instance_id,
            role,
            kv_capacity_tokens=kv_capacity_tokens,
            is_shared=is_shared,
            store_node=store_node,
        )

    def add_store_node(self, node_id: str) -> int:
        self._write(Member(node_id))
        return super().add_store_node(node_id)

    def remove(self, member_id: str) -> None:
        self._write(Changed(member_id, "left"))
        super().remove(member_id)

    def set_available(self, instance_id: str, is_available: bool) -> None:
        self._write(Changed(instance_id, "available" if is_available else "unavailable"))
        super().set_available(instance_id, is_available)

    def sent(self, request: RequestView, decision: Decision, now: float) -> None:
        self._write(Sent(now, request.request_id))
        super().sent(request, decision, now)

    def first_token(self, request_id: str, now: float) -> None:
        self._write(Progress(now, "first_token", request_id))
        super().first_token(request_id, now)

    def prefill_failed(self, request_id: str, now: float) -> None:
        self._write(Progress(now, "prefill_failed", request_id))
        super().prefill_failed(request_id, now)

    def ended(self, request_id: str, now: float, output_tokens: int = 0, *, completed: bool = False) -> None:
        self._write(Progress(now, "ended", request_id, output_tokens, completed))
        super().ended(request_id, now, output_tokens, completed=completed)

    def transfer_started(self, transfer: Transfer) -> None:
        self._write(Copying(transfer, True))
        super().transfer_started(transfer)

    def transfer_ended(self, transfer: Transfer) -> None:
        self._write(Copying(transfer, False))
        super().transfer_ended(transfer)


class RecordingScheduler(Scheduler):
    def __init__(
        self, prefill_policy: Policy, decode_policy: Policy, settings: Settings, write: Write
    ) -> None:
        super().__init__(prefill_policy, decode_policy, settings)
        self._write = write

    def schedule(self, request: RequestView, view: ClusterView, now: float) -> Decision:
        decision = super().schedule(request, view, now)
        self._write(Arrival.of(request, decision, now))
        return decision
