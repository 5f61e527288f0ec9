"""What a router's core was told and what it decided, as data: enough to come to the same decisions again.

A shell (router or simulator) writes one line for each thing that happens, in order; `CoreReplay` gives them
to a fresh core. Times are seconds of the writer's clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from kvcore.wire.events import BlockRemoved, BlockStored, Medium
from router.core.cluster_book import ClusterBook
from router.core.decision import Decision, Transfer
from router.core.policies import make_policy
from router.core.prefix_index import PrefixIndex
from router.core.scheduler import Scheduler
from router.core.settings import Settings
from router.core.view import RequestView, Role


class Member(msgspec.Struct, frozen=True, tag="member"):
    """An instance or, without role, a store node, in the order they joined."""

    member_id: str
    role: Role | None = None
    kv_capacity_tokens: int = 0
    is_shared: bool = False
    store_node: str = ""


class Arrival(msgspec.Struct, frozen=True, tag="arrival"):
    """A request and what was decided: instances by id, "" for none. One that is held arrives again, with the
    `waited_ms` of its view."""

    at: float
    request: RequestView
    prefill: str
    decode: str
    reject_reason: str = ""
    hold_ms: float = 0.0

    @staticmethod
    def of(request: RequestView, decision: Decision, now: float) -> Arrival:
        return Arrival(
            now,
            request,
            decision.prefill.instance_id if decision.prefill is not None else "",
            decision.decode.instance_id if decision.decode is not None else "",
            decision.reject.reason.value if decision.reject is not None else "",
            decision.hold_ms,
        )


class Sent(msgspec.Struct, frozen=True, tag="sent"):
    """The latest decision about this request was carried out."""

    at: float
    request_id: str


class Changed(msgspec.Struct, frozen=True, tag="changed"):
    """An instance became available or not, or any member left for good."""

    member_id: str
    what: Literal["available", "unavailable", "left"]


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    at: float
    what: Literal["first_token", "prefill_failed", "ended"]
    request_id: str
    output_tokens: int = 0
    completed: bool = False


class Copying(msgspec.Struct, frozen=True, tag="copying"):
    """A transfer of blocks began or ended."""

    transfer: Transfer
    has_begun: bool


class Stored(msgspec.Struct, frozen=True, tag="stored"):
    """One BlockStored event of `worker`; tokens are left out where the publisher left them out."""

    worker: int
    block_hashes: Sequence[int]
    parent_block_hash: int | None
    token_ids: Sequence[int]
    block_size: int
    medium: Medium


class Removed(msgspec.Struct, frozen=True, tag="removed"):
    worker: int
    block_hashes: Sequence[int]
    medium: Medium


class Header(msgspec.Struct, frozen=True, tag="header"):
    """What the core was built with."""

    settings: Settings
    prefill_policy: str
    decode_policy: str
    block_size_tokens: int = 0


Line = Header | Member | Changed | Arrival | Sent | Progress | Copying | Stored | Removed


class CoreReplay:
    """The core of one record: `apply` every line after the header in order; `decide` arrivals."""

    def __init__(self, header: Header) -> None:
        self.index = PrefixIndex(header.block_size_tokens) if header.block_size_tokens else None
        self.book = ClusterBook(header.settings, self.index)
        self._latest: dict[str, tuple[RequestView, Decision]] = {}  # decided, not sent yet
        self.scheduler = Scheduler(
            make_policy(header.prefill_policy, header.settings),
            make_policy(header.decode_policy, header.settings),
            header.settings,
        )

    def decide(self, arrival: Arrival) -> Decision:
        view = self.book.view(arrival.at)
        decision = self.scheduler.schedule(arrival.request, view, arrival.at)
        self._latest[arrival.request.request_id] = arrival.request, decision
        if decision.reject is not None:
            del self._latest[arrival.request.request_id]
        return decision

    def apply(self, line: Member | Changed | Sent | Progress | Copying | Stored | Removed) -> None:
        if isinstance(line, Member):
            if line.role is None:
                self.book.add_store_node(line.member_id)
                return
            self.book.add_instance(
                line.member_id,
                line.role,
                kv_capacity_tokens=line.kv_capacity_tokens,
                is_shared=line.is_shared,
                store_node=line.store_node,
            )
        elif isinstance(line, Changed):
            if line.what == "left":
                self.book.remove(line.member_id)
            else:
                self.book.set_available(line.member_id, line.what == "available")
        elif isinstance(line, Sent):
            request, decision = self._latest.pop(line.request_id)
            self.book.sent(request, decision, line.at)
        elif isinstance(line, Progress):
            if line.what == "first_token":
                self.book.first_token(line.request_id, line.at)
            elif line.what == "prefill_failed":
                self.book.prefill_failed(line.request_id, line.at)
            else:
                self.book.ended(line.request_id, line.at, line.output_tokens, completed=line.completed)
        elif isinstance(line, Copying):
            if line.has_begun:
                self.book.transfer_started(line.transfer)
            else:
                self.book.transfer_ended(line.transfer)
        elif self.index is not None:
            if isinstance(line, Stored):
                stored = BlockStored(
                    line.block_hashes, line.parent_block_hash, line.token_ids, line.block_size, line.medium
                )
                self.index.apply(line.worker, [stored])
            else:
                self.index.apply(line.worker, [BlockRemoved(line.block_hashes, line.medium)])
