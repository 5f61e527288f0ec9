"""Algorithm 1 of the Mooncake paper: KVCache-centric scheduling.

    block_keys = PrefixHash(R.prompt_tokens, B)                      the caller (core.block_hash)
    best_prefix_len, best_matched_instance = FindBestPrefixMatch     the prefix index
    for each prefill instance:                                       select_prefill
        if best_prefix_len / instance.prefix_len < kvcache_balancing_threshold:
            TTFT = T_queue + T_prefill(len, instance.prefix_len)
        else:
            TTFT = T_transfer(best - own) + T_queue + T_prefill(len, best_prefix_len)
    the instance with the least TTFT
    d, TBT = SelectDecodingInstance(D)                               select_decode
    if TTFT > TTFT_SLO or TBT > TBT_SLO: reject                      core.admission
    if best_prefix_len / p.prefix_len > kvcache_balancing_threshold: Choice.transfer
        TransferKVCache(best_matched_instance, p)

A prefix of nobody (0 / 0) counts as below the threshold. What we add: an instance's own prefix may lie on its
CPU or disk, whose loading overlaps the computation layer by layer (section 5.2), so the longer of the two
counts; and an instance is scaled by what was measured on it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

from kvcore.wire.events import Medium
from router.core.decision import Candidate, Choice, Transfer
from router.core.estimator import DecodeModel, PrefillModel, TransferModel
from router.core.view import ClusterView, InstanceState, PrefixMatch, RequestView


def select_prefill(
    request: RequestView,
    pool: Sequence[InstanceState],
    match: PrefixMatch | None,
    view: ClusterView,
    now: float,
    prefill_model: PrefillModel,
    transfer_model: TransferModel,
    balancing_threshold: float,
    compute_weight: float = 1.0,
) -> Choice:
    """The instance of `pool` (not empty) with the least predicted TTFT; of equals the first.

    A `compute_weight` above 1 counts the computation so many times: it delays whoever comes next as well.
    `match` None: nothing is known of anybody's prefixes. An infinite `balancing_threshold` never transfers.
    """
    block_size, best_blocks = 1, 0
    own_prefixes: Sequence[int] = [0] * len(pool)
    if match is not None and view.prefix is not None:
        block_size, best_blocks = view.prefix.block_size_tokens, match.best_blocks
        own_prefixes = match.local_blocks_of(pool)
    candidates: list[Candidate] = []
    branches: dict[int, tuple[int, float, float]] = {}  # by own prefix, of which there are few
    least, least_ttft_ms, chosen = math.inf, math.inf, 0
    extra_weight = compute_weight - 1.0
    for instance, own_blocks in zip(pool, own_prefixes, strict=True):
        queue_ms = (instance.prefill_free_at - now) * 1e3
        if queue_ms < instance.backlog_ms:
            queue_ms = instance.backlog_ms
        branch = branches.get(own_blocks)
        if branch is None:
            prefix_blocks, transfer_ms = own_blocks, 0.0
            if best_blocks and best_blocks >= own_blocks * balancing_threshold:
                assert match is not None
                prefix_blocks = best_blocks
                transfer_ms = transfer_model.remote_ms(
                    (best_blocks - own_blocks) * block_size,
                    match.best_medium,
                    view.transfers_from.get(match.best_worker, 0),
                )
            prefix_tokens = min(prefix_blocks * block_size, request.prompt_tokens)
            compute_ms = prefill_model.compute_ms(request.prompt_tokens, prefix_tokens)
            branch = branches[own_blocks] = (prefix_blocks, transfer_ms, compute_ms)
        prefix_blocks, transfer_ms, compute_ms = branch
        compute_ms *= instance.prefill_scale
        if own_blocks and match is not None and match.has_slow_media:
            compute_ms = max(compute_ms, _local_load_ms(instance, match, block_size, transfer_model))
        ttft_ms = queue_ms + transfer_ms + compute_ms
        cost = ttft_ms + extra_weight * compute_ms
        if cost < least:
            least = cost
            least_ttft_ms = ttft_ms
            chosen = len(candidates)
        candidates.append(
            Candidate(instance.instance_id, cost, prefix_blocks, queue_ms, transfer_ms, compute_ms)
        )
    target, best = pool[chosen], candidates[chosen]
    transfer = None
    if match is not None and best_blocks > own_prefixes[chosen] * balancing_threshold:
        source = view.worker_ids.get(match.best_worker, "")
        transfer = Transfer(source, target.instance_id, own_prefixes[chosen], best_blocks)
    return Choice(
        target,
        "least_ttft" if transfer is None else "least_ttft_with_transfer",
        best.cost,
        tuple(candidates),
        predicted_ms=least_ttft_ms,
        prefix_blocks=best.prefix_blocks,
        compute_ms=best.compute_ms,
        transfer=transfer,
    )


def select_decode(
    request: RequestView,
    pool: Sequence[InstanceState],
    decode_model: DecodeModel,
    expected_output_tokens: int,
) -> Choice:
    """The instance of `pool` (not empty) with the least predicted TBT among those with room for the KV cache.

    Room is needed for the prompt and `expected_output_tokens`. When none has it, the least loaded one is
    chosen and `short_of_kv_tokens` says by how much it falls short. Of equals the first.
    """
    needed = request.prompt_tokens + expected_output_tokens
    # The model is linear, so what this request adds is the same everywhere (one multiplication less each).
    alone_ms = decode_model.tbt_ms(1, request.prompt_tokens)
    per_request_ms, per_kv_token_ms = decode_model.per_request_ms, decode_model.per_kv_token_ms
    candidates: list[Candidate] = []
    least_short, least_ms, chosen = sys.maxsize, math.inf, 0
    for instance in pool:
        kv_tokens = instance.kv_used_tokens
        tbt_ms = instance.tbt_scale * (
            alone_ms + per_request_ms * instance.running_requests + per_kv_token_ms * kv_tokens
        )
        capacity = instance.kv_capacity_tokens
        short = kv_tokens + needed - capacity if capacity else 0
        if short < 0:
            short = 0
        if short < least_short or (short == least_short and tbt_ms < least_ms):
            least_short, least_ms = short, tbt_ms
            chosen = len(candidates)
        candidates.append(Candidate(instance.instance_id, tbt_ms))
    return Choice(
        pool[chosen],
        "least_tbt_without_kv_room" if least_short else "least_tbt",
        least_ms,
        tuple(candidates),
        predicted_ms=least_ms,
        short_of_kv_tokens=least_short,
    )


def _local_load_ms(
    instance: InstanceState, match: PrefixMatch, block_size: int, transfer_model: TransferModel
) -> float:
    by_medium = match.blocks_by_medium(instance)
    return sum(
        transfer_model.local_ms(blocks * block_size, medium)
        for medium, blocks in zip(Medium, by_medium, strict=True)
    )
