"""The scheduler side: what it matches, what it plans to load and save, what it answers."""

from collections.abc import Iterator
from typing import Any

import pytest

from kvcore import metrics
from kvcore.client.fake import FakeStoreClient
from mooncake_connector.metadata import LoadMode, RankAnswer
from mooncake_connector.scheduler_side import SchedulerSide
from tests.unit.mooncake_connector.rig import (
    BLOCK_TOKENS,
    Request,
    connector_config,
    scheduler_output,
)
from tests.unit.mooncake_connector.scheduler_rig import DECODE, NAMESPACES, Rig, saved


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.side.shutdown()


def test_nothing_is_matched_before_the_ranks_have_spoken() -> None:
    side = SchedulerSide(connector_config(), FakeStoreClient, BLOCK_TOKENS)
    request = Request("r", range(20))
    side.on_new_request(request)
    assert side.match(request, 0) == (0, False)
    side.update_after_alloc(request, [1, 2, 3, 4, 5], 0)
    plan = side.build_plan(scheduler_output(new=[("r", [1, 2], 0)], scheduled={"r": 20}))
    assert (plan.saves, plan.asks_ranks) == ([], True)
    assert side.request_finished(request) is None
    side.connect([])
    assert side.build_plan(scheduler_output()).asks_ranks, "other connectors' handshakes are no answer"
    side.connect([RankAnswer(NAMESPACES[0])])
    assert not side.build_plan(scheduler_output()).asks_ranks
    side.shutdown()


def test_one_rank_that_cannot_take_part_disables_the_connector() -> None:
    side = SchedulerSide(connector_config(), FakeStoreClient, BLOCK_TOKENS)
    side.connect([RankAnswer(NAMESPACES[0]), RankAnswer(reason="odd tensors")])
    assert side.disabled_reason == "odd tensors"
    assert not side.build_plan(scheduler_output()).asks_ranks, "it will not change its mind"
    assert side.match(Request("r", range(20)), 0) == (0, False)


def test_the_leading_run_in_the_store_is_loaded(rig: Rig) -> None:
    request = Request("r", range(22))
    rig.put(request, range(3))
    rig.side.on_new_request(request)
    assert rig.side.match(request, 0) == (3 * BLOCK_TOKENS, True)
    assert rig.side.match(request, 0) == (3 * BLOCK_TOKENS, True), "asking has no effect"
    rig.alloc(request, [5, 6, 7, 8, 9, 10], 3 * BLOCK_TOKENS)
    [load] = rig.side.build_plan(scheduler_output()).loads
    assert (load.block_hashes, load.block_ids) == (request.block_hashes[:3], [5, 6, 7])
    assert load.mode is LoadMode.ASYNC
    assert rig.side.build_plan(scheduler_output()).loads == []


def test_what_the_engine_has_itself_is_not_loaded(rig: Rig) -> None:
    request = Request("r", range(22))
    rig.put(request, range(4))
    assert rig.side.match(request, 2 * BLOCK_TOKENS) == (2 * BLOCK_TOKENS, True)
    rig.alloc(request, [5, 6, 7, 8, 9, 10], 2 * BLOCK_TOKENS)
    [load] = rig.side.build_plan(scheduler_output()).loads
    assert (load.block_hashes, load.block_ids) == (request.block_hashes[2:4], [7, 8])


def test_one_token_is_always_left_to_compute(rig: Rig) -> None:
    request = Request("r", range(4 * BLOCK_TOKENS))
    rig.put(request, range(4))
    assert rig.side.match(request, 0) == (3 * BLOCK_TOKENS, True)
    assert rig.side.match(request, 3 * BLOCK_TOKENS) == (0, False)


def test_blocks_count_only_if_every_rank_has_them() -> None:
    rig = Rig(NAMESPACES)
    request = Request("r", range(22))
    rig.put(request, range(4), NAMESPACES[:1])
    rig.put(request, range(2), NAMESPACES[1:])
    assert rig.side.match(request, 0) == (2 * BLOCK_TOKENS, True)
    rig.side.shutdown()


def test_a_gap_that_the_engine_fills_itself_does_not_hide_what_lies_behind(rig: Rig) -> None:
    request = Request("r", range(22))
    rig.put(request, range(2, 5))
    assert rig.side.match(request, 0) == (0, False)
    assert rig.side.match(request, 2 * BLOCK_TOKENS) == (3 * BLOCK_TOKENS, True)
    rig.alloc(request, [1, 2, 3, 4, 5, 6], 3 * BLOCK_TOKENS)
    plan = rig.prefill_step(request, [1, 2, 3, 4, 5, 6], 20, 2)
    [save] = plan.saves
    assert save.block_ids[:2] == [1, 2], "the gap is filled in the store too"


def test_synchronous_mode_loads_inside_the_step() -> None:
    rig = Rig(load_mode=LoadMode.SYNC)
    request = Request("r", range(22))
    rig.put(request, range(3))
    assert rig.side.match(request, 0) == (3 * BLOCK_TOKENS, False)
    rig.alloc(request, [1, 2, 3, 4, 5, 6], 3 * BLOCK_TOKENS)
    plan = rig.prefill_step(request, [1, 2, 3, 4, 5, 6], 12, 10)
    assert plan.loads[0].mode is LoadMode.SYNC
    assert plan.saves == [saved(request, 3, 5, [4, 5])]
    rig.side.shutdown()


def test_a_lookup_in_flight_means_ask_again_and_a_late_one_means_nothing() -> None:
    rig = Rig(config={"lookup_wait_ms": 0, "lookup_timeout_ms": 200})
    request = Request("r", range(22))
    rig.put(request, range(3))
    rig.store.delay_ms = 1_000
    assert rig.side.match(request, 0) == (None, False)
    answers = {rig.side.match(request, 0)}
    while (None, False) in answers:
        answers = {rig.side.match(request, 0)}
    assert answers == {(0, False)}
    rig.side.shutdown()


def test_a_store_that_is_down_holds_nothing(rig: Rig) -> None:
    request = Request("r", range(22))
    rig.put(request, range(3))
    rig.store.stop(lose_contents=False)
    assert rig.side.match(request, 0) == (0, False)
    rig.store.start()
    again = Request("again", range(22))
    assert rig.side.match(again, 0) == (3 * BLOCK_TOKENS, True)


def test_full_blocks_are_saved_as_they_fill_up(rig: Rig) -> None:
    request = Request("r", range(14))
    assert rig.side.match(request, 0) == (0, False)
    rig.alloc(request, [1, 2, 3, 4], 0)
    plan = rig.prefill_step(request, [1, 2, 3, 4], 0, 10)
    assert plan.saves == [saved(request, 0, 2, [1, 2])]
    plan = rig.next_step(request, None, 10, 4)
    assert plan.saves == [saved(request, 2, 3, [3])]
    request.tokens += [100, 101]
    assert rig.next_step(request, None, 14, 1).saves == []
    plan = rig.next_step(request, None, 15, 1)
    assert plan.saves == [saved(request, 3, 4, [4])]
    request.tokens += [102]
    assert rig.next_step(request, [9], 16, 1).saves == []


def test_decoded_blocks_may_be_left_out() -> None:
    rig = Rig(config={"save_decode_blocks": False})
    request = Request("r", range(6))
    rig.side.match(request, 0)
    rig.alloc(request, [1, 2], 0)
    assert len(rig.prefill_step(request, [1, 2], 0, 6).saves) == 1
    request.tokens += [100, 101]
    assert rig.next_step(request, None, 6, 2).saves == []
    rig.side.shutdown()


def test_draft_tokens_do_not_fill_a_block(rig: Rig) -> None:
    request = Request("r", range(6))
    rig.side.match(request, 0)
    rig.alloc(request, [1, 2, 3], 0)
    rig.prefill_step(request, [1, 2, 3], 0, 6)
    request.tokens += [100, 101]
    assert rig.next_step(request, None, 6, 3, drafts={"r": [7, 8]}).saves == []
    assert len(rig.next_step(request, None, 7, 1).saves) == 1


def test_a_block_whose_tokens_are_not_known_yet_waits(rig: Rig) -> None:
    """Asynchronous scheduling computes a token before the scheduler has seen it."""
    request = Request("r", range(7))
    rig.side.match(request, 0)
    rig.alloc(request, [1, 2, 3], 0)
    rig.prefill_step(request, [1, 2, 3], 0, 7)
    assert rig.next_step(request, None, 7, 1).saves == []
    request.tokens += [100]
    assert rig.next_step(request, None, 8, 1).saves == [saved(request, 1, 2, [2])]


def test_blocks_that_came_from_the_store_are_not_sent_back(rig: Rig) -> None:
    request = Request("r", range(22))
    rig.put(request, range(3))
    rig.side.match(request, 0)
    rig.alloc(request, [1, 2, 3, 4, 5, 6], 12)
    plan = rig.prefill_step(request, [1, 2, 3, 4, 5, 6], 12, 10)
    assert plan.saves == [saved(request, 3, 5, [4, 5])]


def test_a_preempted_request_matches_again_and_saves_from_its_new_blocks(rig: Rig) -> None:
    request = Request("r", range(14))
    rig.side.match(request, 0)
    rig.alloc(request, [1, 2, 3, 4], 0)
    rig.prefill_step(request, [1, 2, 3, 4], 0, 14)
    request.num_preemptions = 1
    request.tokens += [100, 101]
    rig.put(request, range(2))
    assert rig.side.match(request, 0) == (8, True)
    rig.alloc(request, [11, 12, 13, 14], 8)
    plan = rig.next_step(request, [11, 12, 13, 14], 8, 8, resumed={"r"})
    assert plan.saves == [saved(request, 2, 4, [13, 14])]


def test_a_failed_load_is_not_tried_again_and_its_blocks_are_saved_when_recomputed(rig: Rig) -> None:
    request = Request("r", range(22))
    rig.put(request, range(4))
    rig.side.match(request, 0)
    rig.alloc(request, [1, 2, 3, 4, 5, 6], 16)
    rig.side.build_plan(scheduler_output())
    rig.side.update_output({3, 4})
    assert rig.side.match(request, 0) == (0, False)
    plan = rig.prefill_step(request, [1, 2, 3, 4, 5, 6], 8, 14)
    assert plan.saves == [saved(request, 2, 5, [3, 4, 5])]


def test_after_a_failed_synchronous_load_the_prefix_cache_forgets_what_lies_behind() -> None:
    rig = Rig(load_mode=LoadMode.SYNC)
    evicted: set[int] = set()
    rig.side.evict_from_prefix_cache = evicted.update
    request, other = Request("r", range(22)), Request("o", range(100, 110))
    rig.put(request, range(4))
    for each, block_ids, tokens in ((request, [1, 2, 3, 4, 5, 6], 16), (other, [7, 8, 9], 0)):
        rig.side.match(each, 0)
        rig.alloc(each, block_ids, tokens)
    rig.prefill_step(request, [1, 2, 3, 4, 5, 6], 16, 6)
    rig.side.update_output({3})
    assert evicted == {3, 4, 5, 6}
    rig.side.shutdown()


def test_roles_decide_who_loads_and_who_saves() -> None:
    request = Request("r", range(22))
    producer, consumer = Rig(loads=False), Rig(saves=False)
    for rig in (producer, consumer):
        rig.put(request, range(2))
        rig.side.on_new_request(request)
    assert producer.side.match(request, 0) == (0, False)
    assert consumer.side.match(request, 0) == (8, True)
    for rig, tokens in ((producer, 0), (consumer, 8)):
        rig.alloc(request, [1, 2, 3, 4, 5, 6], tokens)
    assert len(producer.prefill_step(request, [1, 2, 3, 4, 5, 6], 0, 22).saves) == 1
    assert consumer.prefill_step(request, [1, 2, 3, 4, 5, 6], 8, 14).saves == []
    producer.side.shutdown()
    consumer.side.shutdown()


@pytest.mark.parametrize("params", [None, DECODE])
def test_a_request_that_needs_every_token_computed_loads_none_and_is_saved(
    rig: Rig, params: dict[str, Any] | None
) -> None:
    request = Request("r", range(22), params)
    request.skip_reading_prefix_cache = True
    rig.put(request, range(2))
    rig.side.on_new_request(request)
    assert rig.side.match(request, 0) == (0, False)
    blocks = [1, 2, 3, 4, 5, 6]
    rig.alloc(request, blocks, 0)
    assert rig.prefill_step(request, blocks, 0, 22).saves == [saved(request, 0, 5, blocks[:5])]


@pytest.mark.parametrize("media_are_named", [True, False])
def test_prompts_with_media_are_shared_only_where_hashes_say_which(media_are_named: bool) -> None:
    rig = Rig(media_are_named=media_are_named)
    blocks = [1, 2, 3, 4, 5, 6]
    for features in ([], ["a picture"]):
        request = Request(f"r{len(features)}", range(22))
        request.mm_features = features
        shared = media_are_named or not features
        rig.put(request, range(2))
        rig.side.on_new_request(request)
        assert rig.side.match(request, 0) == ((8, True) if shared else (0, False))
        rig.alloc(request, blocks, 8 if shared else 0)
        assert bool(rig.prefill_step(request, blocks, 8, 14).saves) is shared
    rig.side.shutdown()


# ---- prefill / decode pairs


def test_loads_go_out_even_if_planning_saves_fails(rig: Rig) -> None:
    request = Request("r", range(22))
    rig.put(request, range(2))
    rig.side.match(request, 0)
    rig.alloc(request, [1, 2, 3, 4, 5, 6], 8)
    broken = scheduler_output()
    broken.scheduled_cached_reqs = None
    plan = rig.side.build_plan(broken)
    assert (len(plan.loads), plan.saves) == (1, [])
    assert rig.side.counters.take()[metrics.HOOK_ERRORS_TOTAL] == 1


def test_requests_leave_nothing_behind(rig: Rig) -> None:
    for index in range(5):
        request = Request(f"r{index}", range(index, index + 22))
        rig.side.on_new_request(request)
        rig.side.match(request, 4)
        rig.alloc(request, [1, 2, 3, 4, 5, 6], 0)
        rig.side.request_finished(request)
    assert not rig.side._states
    assert rig.side._lookup is not None
    assert not rig.side._lookup._questions
