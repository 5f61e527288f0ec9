"""What comes out of a decision: instances, effects, and the reasons as data."""

from __future__ import annotations

import enum

import msgspec

from router.core.view import InstanceState

MIN_RETRY_AFTER_MS = 1000.0  # Retry-After counts whole seconds


class RejectReason(str, enum.Enum):
    """Why a request is refused; also the label of the metric and the `code` in the client's error."""

    NO_INSTANCE = "no_instance"  # nothing available (503); all others are 429
    TTFT_SLO = "ttft_slo"
    TBT_SLO = "tbt_slo"
    PREFILL_PRICE = "prefill_price"  # its prefill costs more than the queue leaves room for
    DECODE_LOAD = "decode_load"  # decode instances are, or will be, loaded over their SLO
    KV_ROOM = "kv_room"  # no decode instance could hold its KV cache
    QUEUE_FULL = "queue_full"
    QUEUE_TIMEOUT = "queue_timeout"


class Rejection(msgspec.Struct, frozen=True, gc=False):
    """`predicted` against `limit` in the unit the reason implies (ms, a load ratio, tokens)."""

    reason: RejectReason
    retry_after_ms: float = 0.0
    predicted: float = 0.0
    limit: float = 0.0
    detail: str = ""


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """One instance that was looked at. `cost` is what the policy minimised, in ms or as a load."""

    instance_id: str
    cost: float
    prefix_blocks: int = 0
    queue_ms: float = 0.0
    transfer_ms: float = 0.0
    compute_ms: float = 0.0


class Transfer(msgspec.Struct, frozen=True, gc=False):
    """Effect: the leading `num_blocks` blocks of the prompt shall be copied to `target`'s local tier.

    What `target` lacks begins at `first_block`; `source` is a worker id of the view (an instance or a store
    node).
    """

    source: str
    target: str
    first_block: int
    num_blocks: int


class Choice(msgspec.Struct, frozen=True):
    """What one policy says about one pool. `instance` is None only when the pool is empty.

    `cost` is what the policy minimised. `predicted_ms` is the TTFT (prefill) or TBT (decode) to expect, 0
    when the policy makes no prediction. `prefix_blocks` leading blocks need not be computed, transferred ones
    included, and `compute_ms` is what remains. `short_of_kv_tokens`: the instance lacks room for that many.
    """

    instance: InstanceState | None
    reason: str
    cost: float = 0.0
    candidates: tuple[Candidate, ...] = ()
    predicted_ms: float = 0.0
    prefix_blocks: int = 0
    compute_ms: float = 0.0
    short_of_kv_tokens: int = 0
    transfer: Transfer | None = None


class Decision(msgspec.Struct, frozen=True):
    """Where a request goes.

    `decode` answers the client. `prefill` is None when one instance does both. With `reject` set nothing may
    be sent; with `hold_ms` as well the request is not refused yet but asked again after so long, with its
    view's `waited_ms` brought up to date. `prefill_choice` and `decode_choice` say how it came about; unset
    where no choice was made.
    """

    prefill: InstanceState | None = None
    decode: InstanceState | None = None
    transfer: Transfer | None = None
    reject: Rejection | None = None
    ttft_ms: float = 0.0
    tbt_ms: float = 0.0
    prefill_choice: Choice | None = None
    decode_choice: Choice | None = None
    hold_ms: float = 0.0

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Of both pools, prefill first."""
        return tuple(
            candidate
            for choice in (self.prefill_choice, self.decode_choice)
            if choice is not None
            for candidate in choice.candidates
        )

    @property
    def reasons(self) -> tuple[str, ...]:
        """Short codes, in the order they were found: of the policies, the rejection, the transfer."""
        found = [c.reason for c in (self.prefill_choice, self.decode_choice) if c is not None]
        if self.reject is not None:
            found.append(f"{'hold' if self.hold_ms else 'reject'}:{self.reject.reason.value}")
        if self.transfer is not None:
            found.append("replicate_hot_prefix")
        return tuple(found)
