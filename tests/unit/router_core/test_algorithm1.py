"""Algorithm 1, line by line, on cases worked out by hand.

The models are chosen so that sums can be done in the head: a prefill takes 1 ms per token computed and
nothing else, a transfer 0.25 ms per token, a block has 100 tokens and prompts have 1,000.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.wire.events import Medium
from router.core.algorithm1 import select_decode, select_prefill
from router.core.decision import Choice, Transfer
from router.core.estimator import DecodeModel, PrefillModel, TransferModel
from router.core.view import NO_WORKER, ClusterView, InstanceState, PrefixMatch, RequestView

PREFILL = PrefillModel(constant_ms=0.0, per_token_ms=1.0, per_token2_ms=0.0)
TRANSFER = TransferModel(
    kv_bytes_per_token=1000,
    latency_ms=0.0,
    network_bytes_per_s=4e6,
    cpu_bytes_per_s=4e6,
    disk_bytes_per_s=1e6,
)
DECODE = DecodeModel(constant_ms=10.0, per_request_ms=1.0, per_kv_token_ms=0.01)
REQUEST = RequestView("r", prompt_tokens=1000, block_hashes=tuple(range(10)))


class KnownPrefixes(msgspec.Struct):
    """A PrefixSource and PrefixMatch with given answers."""

    blocks_of: dict[int, int]
    best_blocks: int = 0
    best_worker: int = NO_WORKER
    best_medium: Medium = Medium.CPU
    slow: dict[int, tuple[int, int, int, int]] = {}
    block_size_tokens: int = 100

    @property
    def has_slow_media(self) -> bool:
        return bool(self.slow)

    def match(self, block_hashes: Sequence[int], now: float) -> PrefixMatch:
        return self

    def local_blocks_of(self, instances: Sequence[InstanceState]) -> Sequence[int]:
        return [self.blocks_of.get(instance.worker, 0) for instance in instances]

    def blocks_by_medium(self, instance: InstanceState) -> tuple[int, int, int, int]:
        return self.slow.get(instance.worker, (self.blocks_of.get(instance.worker, 0), 0, 0, 0))


def prefixes(*blocks: int, **fields: object) -> KnownPrefixes:
    """Instance i holds blocks[i] and all can be fetched from."""
    best = max(blocks)
    holder = blocks.index(best) if best else NO_WORKER
    return KnownPrefixes(dict(enumerate(blocks)), best, holder, **fields)  # type: ignore[arg-type]


def pool(*queues_ms: float, **fields: object) -> tuple[InstanceState, ...]:
    """Instance i has a queue of queues_ms[i] at time 0."""
    return tuple(
        InstanceState(f"p{i}", i, prefill_free_at=queue_ms / 1e3, **fields)  # type: ignore[arg-type]
        for i, queue_ms in enumerate(queues_ms)
    )


def choose(
    instances: tuple[InstanceState, ...],
    match: KnownPrefixes | None,
    threshold: float = 2.0,
    now: float = 0.0,
    transfers_from: Mapping[int, int] | None = None,
) -> Choice:
    view = ClusterView(
        prefill=instances,
        prefix=match,
        worker_ids={instance.worker: instance.instance_id for instance in instances},
        transfers_from=transfers_from or {},
    )
    return select_prefill(REQUEST, instances, match, view, now, PREFILL, TRANSFER, threshold)


def ttfts(choice: Choice) -> list[float]:
    return [round(candidate.cost, 6) for candidate in choice.candidates]


def test_find_best_prefix_match_over_all_instances() -> None:
    choice = choose(pool(0, 0, 0), prefixes(2, 8, 5))
    assert [c.prefix_blocks for c in choice.candidates] == [8, 8, 5]


def test_ratio_below_the_threshold_uses_the_own_prefix() -> None:
    # 8 / 5 = 1.6 < 2: 500 tokens to compute, no transfer.
    candidate = choose(pool(0, 30), prefixes(8, 5)).candidates[1]
    assert (candidate.prefix_blocks, candidate.queue_ms, candidate.transfer_ms) == (5, 30, 0)
    assert (candidate.compute_ms, candidate.cost) == (500, 530)


def test_ratio_above_the_threshold_fetches_the_best_prefix() -> None:
    # 8 / 3 = 2.67: 500 tokens to fetch at 0.25 ms, 200 to compute.
    candidate = choose(pool(0, 30), prefixes(8, 3)).candidates[1]
    assert (candidate.prefix_blocks, candidate.queue_ms, candidate.transfer_ms) == (8, 30, 125)
    assert (candidate.compute_ms, candidate.cost) == (200, 355)


def test_ratio_equal_to_the_threshold_is_estimated_with_the_transfer_but_nothing_is_replicated() -> None:
    # The paper: "<" in the loop, ">" at the end.
    choice = choose(pool(1000, 0), prefixes(8, 4))
    assert ttfts(choice) == [1200, 100 + 200]
    assert choice.instance is not None and choice.instance.instance_id == "p1"
    assert choice.transfer is None


def test_an_instance_without_any_prefix_has_an_infinite_ratio() -> None:
    assert ttfts(choose(pool(0, 0), prefixes(8, 0))) == [200, 200 + 200]


def test_when_nobody_has_a_prefix_everything_is_computed() -> None:
    choice = choose(pool(7, 0), prefixes(0, 0))
    assert ttfts(choice) == [1007, 1000]
    assert choice.transfer is None


def test_queue_time_is_what_remains_now() -> None:
    assert [c.queue_ms for c in choose(pool(300, 100), None, now=0.2).candidates] == [pytest.approx(100), 0]


def test_queue_time_never_goes_below_what_has_not_begun() -> None:
    late = InstanceState("p0", 0, prefill_free_at=0.1, backlog_ms=40)
    assert choose((late,), None, now=5.0).candidates[0].queue_ms == 40


def test_transfer_time_counts_the_missing_part_only() -> None:
    assert choose(pool(0, 0), prefixes(9, 3)).candidates[1].transfer_ms == 600 * 0.25


def test_a_busy_source_transfers_more_slowly() -> None:
    # p0 sends two copies already: a third of the link each.
    assert choose(pool(0, 0), prefixes(9, 3), transfers_from={0: 2}).candidates[1].transfer_ms == 600 * 0.75


def test_the_source_medium_bounds_the_transfer() -> None:
    match = prefixes(9, 3, best_medium=Medium.DISK)
    assert choose(pool(0, 0), match).candidates[1].transfer_ms == 600 * 1.0


def test_the_least_ttft_wins_not_the_longest_prefix() -> None:
    # Cache alone would say p0 (8 blocks), load alone p2 (no queue).
    choice = choose(pool(500, 80, 0), prefixes(8, 7, 4), threshold=3.0)
    assert ttfts(choice) == [700, 380, 600]
    assert choice.instance is not None and choice.instance.instance_id == "p1"
    assert (choice.predicted_ms, choice.prefix_blocks, choice.compute_ms) == (380, 7, 300)


def test_of_equals_the_first_is_kept() -> None:
    choice = choose(pool(5, 5), prefixes(4, 4))
    assert choice.instance is not None and choice.instance.instance_id == "p0"


def test_hot_prefix_is_replicated_to_the_chosen_instance() -> None:
    choice = choose(pool(900, 0), prefixes(8, 3))
    assert choice.instance is not None and choice.instance.instance_id == "p1"
    assert choice.transfer == Transfer("p0", "p1", 3, 8)
    assert choice.reason == "least_ttft_with_transfer"


def test_no_replication_when_the_chosen_instance_has_enough() -> None:
    choice = choose(pool(900, 0), prefixes(8, 5))
    assert choice.instance is not None and choice.instance.instance_id == "p1"
    assert (choice.transfer, choice.reason) == (None, "least_ttft")


def test_no_replication_when_the_holder_itself_is_chosen() -> None:
    assert choose(pool(0, 900), prefixes(8, 3)).transfer is None


def test_an_infinite_threshold_is_the_cache_aware_baseline() -> None:
    choice = choose(pool(900, 0), prefixes(8, 3), threshold=math.inf)
    assert ttfts(choice) == [1100, 700]
    assert choice.transfer is None


def test_a_store_node_can_be_the_best_match() -> None:
    match = KnownPrefixes({0: 2, 1: 0}, best_blocks=6, best_worker=9)
    instances = pool(0, 0)
    view = ClusterView(prefill=instances, prefix=match, worker_ids={0: "p0", 1: "p1", 9: "store-1"})
    choice = select_prefill(REQUEST, instances, match, view, 0.0, PREFILL, TRANSFER, 2.0)
    assert ttfts(choice) == [100 + 400, 150 + 400]
    assert choice.transfer == Transfer("store-1", "p0", 2, 6)


def test_own_blocks_on_slow_media_cost_their_loading_when_that_is_longer() -> None:
    # p0: 2 blocks on GPU and 7 on disk (700 ms at 1 MB/s), 100 tokens to compute meanwhile; p1: CPU, 175 ms.
    match = prefixes(9, 9, slow={0: (2, 0, 7, 0), 1: (2, 7, 0, 0)})
    assert ttfts(choose(pool(0, 0), match)) == [700, 175]
    # Half as many on CPU load while 600 tokens are computed: nothing is lost.
    match = prefixes(4, 4, slow={0: (0, 4, 0, 0), 1: (4, 0, 0, 0)})
    assert ttfts(choose(pool(0, 0), match)) == [600, 600]


def test_an_instance_that_was_measured_slow_is_scaled() -> None:
    slow = msgspec.structs.replace(pool(0)[0], prefill_scale=1.5)
    assert ttfts(choose((slow,), prefixes(4))) == [900]


def test_a_prefix_never_exceeds_the_prompt() -> None:
    match = prefixes(11)
    assert ttfts(choose(pool(0), match)) == [0]


def decode_pool(*loads: tuple[int, int, int]) -> tuple[InstanceState, ...]:
    return tuple(
        InstanceState(f"d{i}", running_requests=running, kv_used_tokens=used, kv_capacity_tokens=capacity)
        for i, (running, used, capacity) in enumerate(loads)
    )


def test_decode_goes_to_the_least_tbt() -> None:
    # 10 + (b + 1) + (kv + 1000) / 100
    choice = select_decode(REQUEST, decode_pool((4, 5000, 0), (6, 2000, 0), (5, 4000, 0)), DECODE, 100)
    assert ttfts(choice) == [75, 47, 66]
    assert choice.instance is not None and choice.instance.instance_id == "d1"
    assert (choice.predicted_ms, choice.short_of_kv_tokens, choice.reason) == (47, 0, "least_tbt")


def test_decode_needs_room_for_prompt_and_output() -> None:
    # d0 lacks one token: 7,901 + 1,100 > 9,000.
    choice = select_decode(REQUEST, decode_pool((0, 7901, 9000), (50, 7900, 9000)), DECODE, 100)
    assert choice.instance is not None and choice.instance.instance_id == "d1"
    assert choice.short_of_kv_tokens == 0


def test_without_room_anywhere_the_least_short_is_named() -> None:
    choice = select_decode(REQUEST, decode_pool((0, 8500, 9000), (50, 8400, 9000)), DECODE, 100)
    assert choice.instance is not None and choice.instance.instance_id == "d1"
    assert (choice.short_of_kv_tokens, choice.reason) == (500, "least_tbt_without_kv_room")


def test_decode_scale_and_ties() -> None:
    slow, fast = decode_pool((1, 100, 0), (1, 100, 0))
    slow = msgspec.structs.replace(slow, tbt_scale=2.0)
    choice = select_decode(REQUEST, (slow, fast, fast), DECODE, 0)
    assert choice.instance is fast
    assert choice.candidates[0].cost == 2 * choice.candidates[1].cost


numbers = st.integers(0, 10)


@given(
    st.lists(st.tuples(st.integers(0, 1000), numbers, st.floats(0.5, 2)), min_size=1, max_size=8),
    st.floats(1, 5),
    st.floats(0, 2),
)
def test_against_the_paper_read_naively(
    instances: list[tuple[int, int, float]], threshold: float, now: float
) -> None:
    model = PrefillModel(2.0, 0.5, 1e-4)
    states = tuple(
        InstanceState(f"p{i}", i, prefill_free_at=queue / 1e3, prefill_scale=scale)
        for i, (queue, _, scale) in enumerate(instances)
    )
    match = prefixes(*(own for _, own, _ in instances))
    ttft, p = math.inf, None
    for state, (_, own, scale) in zip(states, instances, strict=True):
        ratio = match.best_blocks / own if own else (math.inf if match.best_blocks else 0.0)
        if ratio < threshold:
            total = state.queue_ms(now) + model.compute_ms(1000, own * 100) * scale
        else:
            transfer = TRANSFER.remote_ms((match.best_blocks - own) * 100, Medium.CPU)
            total = transfer + state.queue_ms(now) + model.compute_ms(1000, match.best_blocks * 100) * scale
        if ttft > total + 1e-9:
            ttft, p = total, state
    view = ClusterView(prefill=states, prefix=match)
    choice = select_prefill(REQUEST, states, match, view, now, model, TRANSFER, threshold)
    assert choice.predicted_ms == pytest.approx(ttft)
    assert p is not None and choice.instance is not None
    assert choice.candidates[states.index(p)].cost == pytest.approx(choice.predicted_ms)


@given(
    st.lists(
        st.tuples(numbers, st.integers(0, 5000), st.integers(0, 9000), st.floats(0.5, 2)),
        min_size=1,
        max_size=8,
    )
)
def test_decode_against_the_model_read_naively(instances: list[tuple[int, int, int, float]]) -> None:
    states = tuple(
        InstanceState(f"d{i}", running_requests=b, kv_used_tokens=k, kv_capacity_tokens=c, tbt_scale=scale)
        for i, (b, k, c, scale) in enumerate(instances)
    )
    choice = select_decode(REQUEST, states, DECODE, 50)
    keys = [
        (max(0, k + 1050 - c) if c else 0, scale * DECODE.tbt_ms(b + 1, k + 1000))
        for b, k, c, scale in instances
    ]
    assert (choice.short_of_kv_tokens, choice.predicted_ms) == pytest.approx(min(keys))
    assert [c.cost for c in choice.candidates] == pytest.approx([key[1] for key in keys])
