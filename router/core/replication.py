"""Hot-spot migration (section 6.2 of the Mooncake paper): what Algorithm 1 transfers is copied to the store
of the chosen instance, so that its connector, and the next request there, find it next to them.

Copied is what costs less to copy than to compute. The request may wait for it, at most for as long as
computing would have taken: then nobody waits longer than twice what the better choice would have cost,
however wrong the transfer model is. Where that could break an SLO by which requests are refused, the copy
goes on for those who come after, and the request does not wait.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvcore.keys import BLOCK_HASH_BYTES
from router.core.admission.base import limit_ms
from router.core.decision import Decision
from router.core.settings import Settings
from router.core.view import RequestView


class CopyPlan(msgspec.Struct, frozen=True, gc=False):
    """Effect: `target`'s store shall copy blocks [first_block, num_blocks) of the prompt from `source`; both
    are ids of store nodes. The request waits up to `wait_ms` for it, 0: not at all."""

    source: str
    target: str
    first_block: int
    num_blocks: int
    wait_ms: float


def plan_copy(
    request: RequestView, decision: Decision, target_store: str, block_size_tokens: int, settings: Settings
) -> CopyPlan | None:
    """What to copy for `decision`, whose chosen instance uses `target_store` (a store node, "" for none).
    None: no transfer was decided, the prefix is in that store already, or computing it is cheaper."""
    transfer, choice = decision.transfer, decision.prefill_choice
    if transfer is None or choice is None or choice.instance is None:
        return None
    if target_store in ("", transfer.source):
        return None
    chosen = next(one for one in choice.candidates if one.instance_id == transfer.target)
    own_tokens = transfer.first_block * block_size_tokens
    alone_ms = choice.instance.prefill_scale * settings.prefill_model.compute_ms(
        request.prompt_tokens, min(own_tokens, request.prompt_tokens)
    )
    saved_ms = alone_ms - chosen.compute_ms
    if chosen.transfer_ms >= saved_ms:
        return None
    wait_ms = saved_ms
    slo_ms = limit_ms(request.ttft_slo_ms, settings.ttft_slo_ms, request, settings)
    if slo_ms and settings.admission != "none":
        slack_ms = slo_ms - request.waited_ms - chosen.queue_ms - alone_ms
        wait_ms = min(wait_ms, slack_ms) if slack_ms > chosen.transfer_ms else 0.0
    return CopyPlan(transfer.source, target_store, transfer.first_block, transfer.num_blocks, wait_ms)


def parents_of(keys: Sequence[bytes]) -> list[bytes]:
    """For each key of one prefix the key of the block before it, b"" for the first; ranks may be mixed."""
    last: dict[bytes, bytes] = {}
    parents = []
    for key in keys:
        rank = key[:-BLOCK_HASH_BYTES]  # what stands before is equal for all blocks of one rank of one engine
        parents.append(last.get(rank, b""))
        last[rank] = key
    return parents
