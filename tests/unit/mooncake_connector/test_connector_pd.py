"""The scheduler side of P/D: decode legs that follow, prefill legs that deliver or say that they do not."""

from collections.abc import Iterator

import pytest

from kvcore.client.fake import FakeStoreClient
from kvcore.clock import VirtualClock
from kvcore.keys import block_keys
from mooncake_connector.metadata import LoadMode
from tests.unit.mooncake_connector.rig import (
    DEADLINE_MS,
    Request,
    scheduler_output,
)
from tests.unit.mooncake_connector.scheduler_rig import DECODE, NAMESPACES, PREFILL, Rig, saved


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.side.shutdown()


def test_a_decode_leg_follows_blocks_that_nobody_has_begun(rig: Rig) -> None:
    request = Request("d", range(22), DECODE)
    rig.side.on_new_request(request)
    assert rig.side.match(request, 4) == (16, True)
    rig.alloc(request, [1, 2, 3, 4, 5, 6], 16)
    [load] = rig.side.build_plan(scheduler_output()).loads
    assert (load.mode, load.timeout_ms, load.block_ids) == (LoadMode.FOLLOW, 1234, [2, 3, 4, 5])
    plan = rig.prefill_step(request, [1, 2, 3, 4, 5, 6], 20, 2)
    assert plan.saves == [], "its prefill engine saves the prompt"
    assert rig.side.request_finished(request) == {
        "mooncake_pd": {"role": "decode", "transfer_id": "t1", "saved_blocks": 0, "loaded_blocks": 4}
    }


def test_a_request_cannot_make_the_engine_wait_longer_than_it_allows() -> None:
    rig = Rig(config={"pd_wait_ms": 500})
    request = Request("d", range(22), DECODE)
    rig.side.match(request, 0)
    rig.alloc(request, [1, 2, 3, 4, 5, 6], 20)
    assert rig.side.build_plan(scheduler_output()).loads[0].timeout_ms == 500
    rig.side.shutdown()


def test_prefill_engines_that_never_deliver_are_not_waited_for_any_more() -> None:
    clock = VirtualClock()
    rig = Rig(clock=clock.now)

    def follow(lost: set[int]) -> LoadMode | None:
        """How a new decode leg gets its prompt, whose blocks `lost` then do not come."""
        request = Request("d", range(22), DECODE)
        tokens, _ = rig.side.match(request, 0)
        rig.alloc(request, [1, 2, 3, 4, 5, 6], tokens or 0)
        loads = rig.side.build_plan(scheduler_output()).loads
        rig.side.update_output(lost)
        rig.side.request_finished(request)
        return loads[0].mode if loads else None

    everything = {1, 2, 3, 4, 5}
    assert [follow(everything), follow(everything)] == [LoadMode.FOLLOW] * 2
    assert follow(set()) is LoadMode.FOLLOW, "one that delivers restores the trust"
    assert [follow({3, 4, 5}) for _ in range(5)] == [LoadMode.FOLLOW] * 5, "some blocks are better than none"
    assert [follow(everything) for _ in range(4)] == [LoadMode.FOLLOW] * 3 + [None]
    clock.advance(61)
    assert [follow(everything) for _ in range(2)] == [LoadMode.FOLLOW, None]
    rig.side.shutdown()


def test_a_decode_leg_that_fails_or_is_preempted_takes_what_is_there(rig: Rig) -> None:
    failed, preempted = Request("f", range(22), DECODE), Request("p", range(30, 52), DECODE)
    rig.side.match(failed, 0)
    rig.alloc(failed, [1, 2, 3, 4, 5, 6], 20)
    rig.side.update_output({1})
    assert rig.side.match(failed, 0) == (0, False)
    rig.side.match(preempted, 0)
    rig.alloc(preempted, [7, 8, 9, 10, 11, 12], 20)
    preempted.num_preemptions = 1
    rig.put(preempted, range(1))
    assert rig.side.match(preempted, 0) == (4, True)
    rig.alloc(preempted, [7, 8, 9, 10, 11, 12], 4)
    assert rig.side.build_plan(scheduler_output()).loads[-1].mode is LoadMode.ASYNC


def test_a_prefill_leg_saves_blocks_that_only_the_engine_itself_had(rig: Rig) -> None:
    request = Request("p", range(22), PREFILL)
    rig.put(request, range(1))
    assert rig.side.match(request, 16) == (0, False)
    rig.alloc(request, [1, 2, 3, 4, 5, 6], 0)
    plan = rig.prefill_step(request, [1, 2, 3, 4, 5, 6], 16, 6)
    assert plan.saves == [saved(request, 1, 5, [2, 3, 4, 5], followed=True)]


def test_a_prefill_leg_saves_even_on_a_consumer() -> None:
    rig = Rig(saves=False)
    request = Request("p", range(10), PREFILL)
    rig.side.match(request, 0)
    rig.alloc(request, [1, 2, 3], 0)
    assert len(rig.prefill_step(request, [1, 2, 3], 0, 10).saves) == 1
    rig.side.shutdown()


def test_a_prefill_leg_that_ends_early_wakes_its_decode_leg(rig: Rig) -> None:
    request = Request("p", range(22), PREFILL)
    rig.side.match(request, 0)
    rig.alloc(request, [1, 2, 3, 4, 5, 6], 0)
    rig.prefill_step(request, [1, 2, 3, 4, 5, 6], 0, 9)
    keys = block_keys(NAMESPACES[0], request.block_hashes)
    follower = FakeStoreClient(rig.store).read_layers(keys[2:3], 0, 1, [bytearray(8)], wait_ms=DEADLINE_MS)
    answer = rig.side.request_finished(request)
    assert answer is not None
    assert answer["mooncake_pd"]["saved_blocks"] == 2
    [status] = follower.wait()
    assert status.name == "ABANDONED"
    assert ("abort", keys[2:5]) in rig.client.calls


def test_a_prefill_leg_that_is_done_aborts_nothing(rig: Rig) -> None:
    request = Request("p", range(20), PREFILL)
    rig.side.match(request, 0)
    rig.alloc(request, [1, 2, 3, 4, 5], 0)
    rig.prefill_step(request, [1, 2, 3, 4, 5], 0, 20)
    rig.side.request_finished(request)
    rig.side.shutdown()
    assert "abort" not in [name for name, _ in rig.client.calls]


def test_malformed_pd_parameters_are_served_like_any_request(rig: Rig) -> None:
    request = Request("r", range(22), {"mooncake_pd": {"role": "chef"}})
    assert rig.side.match(request, 0) == (0, False)
    assert rig.side.request_finished(request) is None
