"""When a prefix is copied to the chosen instance's store, and for how long the request waits: by hand.

A prefill takes 1 ms per token computed, a transfer 0.25 ms per token; a block has 100 tokens, the prompt
1,000.
"""

import msgspec
import pytest

from router.core.algorithm1 import select_prefill
from router.core.decision import Decision
from router.core.replication import CopyPlan, parents_of, plan_copy
from router.core.settings import Settings
from router.core.view import ClusterView, InstanceState, RequestView
from tests.unit.router_core.test_algorithm1 import PREFILL, REQUEST, TRANSFER, KnownPrefixes, pool

SETTINGS = Settings(prefill_model=PREFILL, transfer_model=TRANSFER)
STORE = 7  # the worker whose prefix is the longest


def decide(
    own_blocks: int = 0, best_blocks: int = 8, queue_ms: float = 0.0, request: RequestView = REQUEST
) -> Decision:
    match = KnownPrefixes({0: own_blocks}, best_blocks, STORE)
    view = ClusterView(prefix=match, worker_ids={STORE: "store a"})
    choice = select_prefill(
        request, pool(queue_ms), match, view, 0.0, PREFILL, TRANSFER, SETTINGS.kvcache_balancing_threshold
    )
    return Decision(decode=choice.instance, transfer=choice.transfer, prefill_choice=choice)


def plan(decision: Decision, target_store: str = "store b", settings: Settings = SETTINGS) -> CopyPlan | None:
    return plan_copy(REQUEST, decision, target_store, 100, settings)


def test_what_is_cheaper_to_copy_than_to_compute_is_copied_and_waited_for_as_long_as_computing() -> None:
    # 800 tokens: copied in 200 ms, computed in 800.
    assert plan(decide()) == CopyPlan("store a", "store b", 0, 8, 800.0)
    # 600 of them, for the first 200 are there.
    assert plan(decide(own_blocks=2)) == CopyPlan("store a", "store b", 2, 8, 600.0)


def test_a_queue_does_not_shorten_the_wait_for_engines_ask_their_store_when_the_request_comes() -> None:
    found = plan(decide(queue_ms=5000.0))
    assert found is not None and found.wait_ms == 800.0


@pytest.mark.parametrize("target_store", ["", "store a"])
def test_an_engine_of_the_same_store_or_of_none_needs_no_copy(target_store: str) -> None:
    assert plan(decide(), target_store) is None


def test_below_the_threshold_nothing_is_transferred_so_nothing_is_copied() -> None:
    assert decide(own_blocks=5).transfer is None
    assert plan(decide(own_blocks=5)) is None


def test_what_is_computed_faster_than_copied_is_computed() -> None:
    fast = msgspec.structs.replace(SETTINGS, prefill_model=msgspec.structs.replace(PREFILL, per_token_ms=0.2))
    decision = decide()
    # The choice was made with 1 ms a token for the last 200: as if nothing were saved by the other 800.
    assert decision.prefill_choice is not None and decision.prefill_choice.compute_ms == 200.0
    assert plan(decision, settings=fast) is None


def test_a_slow_instance_saves_more() -> None:
    decision = decide()
    assert decision.prefill_choice is not None
    slow = msgspec.structs.replace(decision.prefill_choice.instance or InstanceState("p0"), prefill_scale=2.0)
    choice = msgspec.structs.replace(decision.prefill_choice, instance=slow)
    found = plan(msgspec.structs.replace(decision, prefill_choice=choice))
    assert found is not None and found.wait_ms == 2 * 1000.0 - 200.0


def test_nobody_is_made_to_wait_past_an_slo_by_which_requests_are_refused() -> None:
    def wait_ms(slo_ms: float, admission: str = "early", waited_ms: float = 0.0) -> float:
        settings = msgspec.structs.replace(SETTINGS, ttft_slo_ms=slo_ms, admission=admission)
        request = msgspec.structs.replace(REQUEST, waited_ms=waited_ms)
        found = plan_copy(request, decide(queue_ms=100.0), "store b", 100, settings)
        assert found is not None
        return found.wait_ms

    # Without a copy it would take 100 + 1000 ms, so of 1,500 there are 400 to wait in, and of 1,250 too few.
    assert wait_ms(1500.0) == 400.0
    assert wait_ms(1250.0) == 0.0
    assert wait_ms(1500.0, waited_ms=100.0) == 300.0
    assert wait_ms(1250.0, admission="none") == 800.0
    assert wait_ms(10_000.0) == 800.0


def test_a_rejected_request_copies_nothing() -> None:
    assert plan(Decision()) is None


def test_parents_are_found_rank_by_rank() -> None:
    def key(rank: int, block: int) -> bytes:
        return bytes([rank]) * 16 + bytes([block]) * 16

    keys = [key(0, 1), key(1, 1), key(0, 2), key(1, 2), key(1, 3)]
    assert parents_of(keys) == [b"", b"", key(0, 1), key(1, 1), key(1, 2)]
    assert parents_of([]) == []
