"""One request on its way through the cluster, and what came of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from kvsim.trace import Trace, TraceRequest
from router.core.block_hash import TOKEN_BYTES, chain
from router.core.decision import Decision
from router.core.view import RequestView


class Outcome(msgspec.Struct, gc=False):
    """`reject_reason` "" when it was served. `hit_tokens` needed not be computed. `prefill_ms` is compute
    time of the prefill (of all nodes that shared it). Times of requests refused are 0.

    `handover_ms`: from the end of a prefill elsewhere until the request joins its decode batch, the waits for
    its KV and for room. It is part of `ttft_ms`, as the decode side answers the client. Whoever counts the
    first token where it is computed has it in the first interval instead: `tbt_at_prefill_ms`.
    """

    number: int
    arrived_at: float
    prompt_tokens: int
    output_tokens: int
    reject_reason: str = ""
    wasted_prefill: bool = False
    ttft_ms: float = 0.0
    tbt_ms: float = 0.0
    mean_tbt_ms: float = 0.0
    handover_ms: float = 0.0
    tbt_at_prefill_ms: float = 0.0
    hit_tokens: int = 0
    hit_blocks: int = 0
    num_blocks: int = 0
    prefill_ms: float = 0.0
    predicted_ttft_ms: float = 0.0
    ended_at: float = 0.0

    @property
    def is_served(self) -> bool:
        return not self.reject_reason

    def is_good(self, ttft_slo_ms: float, tbt_slo_ms: float, at_prefill: bool = False) -> bool:
        """`at_prefill`: with the first token counted at the end of its prefill."""
        if at_prefill:
            ttft_ms, tbt_ms = self.ttft_ms - self.handover_ms, self.tbt_at_prefill_ms
        else:
            ttft_ms, tbt_ms = self.ttft_ms, self.tbt_ms
        return self.is_served and ttft_ms <= ttft_slo_ms and tbt_ms <= tbt_slo_ms


class Job:
    """`hashes` is the router's chain over the prompt's blocks and, in bytes, `keys` their names in caches."""

    __slots__ = (
        "decision",
        "first_wait_ms",
        "handed_over",
        "hashes",
        "keys",
        "log_mark",
        "needs_transfer",
        "outcome",
        "prefilled_at",
        "prefilled_tokens",
        "request",
        "view",
    )

    def __init__(self, number: int, request: TraceRequest, block_size_tokens: int) -> None:
        self.request = request
        self.hashes = chain(
            token_bytes(request.hash_ids, block_size_tokens), block_size_tokens * TOKEN_BYTES, 0, None
        )
        self.keys = [block_hash.to_bytes(8, "big") for block_hash in self.hashes]
        self.view = RequestView(
            f"r{number}",
            request.prompt_tokens,
            self.hashes,
            tenant=request.tenant,
            session_id=request.session_id,
            priority=request.priority,
        )
        self.outcome = Outcome(
            number,
            request.at,
            request.prompt_tokens,
            request.output_tokens,
            num_blocks=len(request.hash_ids),
        )
        self.decision = Decision()
        self.needs_transfer = False
        self.handed_over = 0  # of two: prefill done, KV arrived at the decode node
        self.prefilled_at: float | None = None  # by a node that does not decode it
        self.prefilled_tokens = 0
        self.first_wait_ms = 0.0
        self.log_mark = 0

    @property
    def request_id(self) -> str:
        return self.view.request_id

    @property
    def final_kv_tokens(self) -> int:
        return self.request.prompt_tokens + self.request.output_tokens


def token_bytes(hash_ids: Sequence[int], block_size_tokens: int) -> bytes:
    """Token ids, as u32, such that equal prefixes have equal hash ids. Traces hold no text to publish.

    A partial last block is published as a full one: traces name it, and it is hit when the same prompt comes
    again."""
    size = block_size_tokens * TOKEN_BYTES
    repeat = -(-size // 8)
    return b"".join([(hash_id.to_bytes(8, "little") * repeat)[:size] for hash_id in hash_ids])


def jobs_of(trace: Trace) -> Iterator[Job]:
    """Made one by one: a trace's hashes are not all kept."""
    for number, request in enumerate(trace.requests):
        yield Job(number, request, trace.block_size_tokens)
