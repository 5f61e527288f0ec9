"""Layer-wise save: what arrives in the store is right, complete, in order, and never in the engine's way."""

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore import metrics
from kvcore.client.fake import FakeStore
from kvcore.errors import ConfigError
from kvcore.wire.messages import Status
from mooncake_connector.metadata import LoadMode, LoadSpec, SaveSpec, StepPlan
from mooncake_connector.staging import Staging
from tests.unit.mooncake_connector.rig import (
    DEADLINE_MS,
    LAYER_BYTES,
    NUM_BLOCKS,
    NUM_LAYERS,
    Engine,
    block_hashes,
    engine_facts,
    kv_bytes,
    name_of,
)

HASHES = block_hashes(range(16))
pytestmark = pytest.mark.usefixtures("memory_kind")


def stored(store: FakeStore) -> dict[bytes, bytes]:
    """Name of a block -> bytes, of sealed objects."""
    return {key[16:]: bytes(item.data) for key, item in store.objects.items() if item.sealed}


def expected(block_hash: bytes) -> bytes:
    return b"".join(kv_bytes(block_hash, layer).tobytes() for layer in range(NUM_LAYERS))


def check_contents(store: FakeStore, hashes: list[bytes]) -> None:
    assert stored(store) == {name_of(block_hash): expected(block_hash) for block_hash in hashes}


def test_blocks_arrive_with_the_bytes_of_all_layers() -> None:
    store = FakeStore()
    engine = Engine(store)
    engine.save(HASHES, [3, 0, 7, 1])
    check_contents(store, HASHES)
    counted = engine.worker.counters.take()
    assert counted[metrics.SAVED_BLOCKS_TOTAL] == 4
    assert counted[metrics.SAVED_BYTES_TOTAL] == 4 * NUM_LAYERS * LAYER_BYTES
    engine.close()


def test_the_store_learns_which_block_each_one_continues() -> None:
    engine = Engine(FakeStore())
    engine.step(
        saves=[
            SaveSpec("first", HASHES[:2], [1, 2]),
            SaveSpec("chunk", HASHES[3:4], [4], parent_hash=HASHES[2]),
        ]
    )
    assert engine.worker.drain(DEADLINE_MS)
    told = {key[16:]: parent[16:] for key, parent in engine.client.parents.items()}
    short = [name_of(block_hash) for block_hash in HASHES]
    assert told == {short[0]: b"", short[1]: short[0], short[3]: short[2]}
    engine.close()


def test_a_layer_is_in_the_store_while_the_next_one_has_not_been_computed() -> None:
    store = FakeStore()
    engine = Engine(store)
    ready_before: list[int] = []

    def before_layer(layer: int) -> None:
        with store.changed:
            assert store.changed.wait_for(
                lambda: min((item.layers_ready for item in store.objects.values()), default=0) == layer, 20
            )
            ready_before.append(layer)

    engine.step(saves=[SaveSpec("r", HASHES, [0, 1, 2, 3])], before_layer=before_layer)
    assert ready_before == list(range(NUM_LAYERS))
    engine.close()


def test_engine_blocks_may_be_overwritten_as_soon_as_the_step_is_over() -> None:
    store = FakeStore()
    store.delay_ms = 30
    engine = Engine(store)
    engine.step(saves=[SaveSpec("r", HASHES[:2], [0, 1])])
    engine.overwrite(range(NUM_BLOCKS), 99)
    assert engine.worker.drain(DEADLINE_MS)
    check_contents(store, HASHES[:2])
    engine.close()


def test_layers_that_no_hook_announces_are_saved_at_the_end_of_the_step() -> None:
    store = FakeStore()
    engine = Engine(store)
    engine.step(saves=[SaveSpec("r", HASHES, [0, 1, 2, 3])], hooks=False)
    assert engine.worker.drain(DEADLINE_MS)
    check_contents(store, HASHES)
    engine.close()


def test_hooks_are_not_trusted_when_layers_run_more_than_once() -> None:
    store = FakeStore()
    engine = Engine(store, layer_hooks=False)
    engine.step(saves=[SaveSpec("r", HASHES, [0, 1, 2, 3])])
    assert engine.worker.drain(DEADLINE_MS)
    check_contents(store, HASHES)
    assert [name for name, _ in engine.client.calls].count("write_layers") == 1
    engine.close()


def test_layers_announced_out_of_order_are_committed_in_order() -> None:
    store = FakeStore()
    engine = Engine(store)
    worker = engine.worker
    for layer in range(NUM_LAYERS):
        engine.compute(layer, 5, HASHES[0])
    worker.begin_step(StepPlan([], [SaveSpec("r", HASHES[:1], [5])]))
    for layer in (2, 0, 1):
        worker.save_layer(f"model.layers.{layer}.attn")
    worker.save_layer("model.layers.0.attn")  # announced twice
    worker.save_layer("lm_head")  # none of ours
    worker.end_step()
    assert worker.drain(DEADLINE_MS)
    check_contents(store, HASHES[:1])
    engine.close()


def test_blocks_that_are_there_are_not_sent_again() -> None:
    store = FakeStore()
    engine = Engine(store)
    engine.save(HASHES[:2], [0, 1])
    engine.worker.counters.take()
    engine.save(HASHES, [0, 1, 2, 3])
    counted = engine.worker.counters.take()
    assert (counted[metrics.SAVE_SKIPPED_PRESENT_TOTAL], counted[metrics.SAVED_BLOCKS_TOTAL]) == (2, 2)
    check_contents(store, HASHES)
    engine.close()


def test_a_block_named_by_two_requests_of_a_step_is_saved_once() -> None:
    store = FakeStore()
    engine = Engine(store)
    engine.step(saves=[SaveSpec("a", HASHES[:2], [0, 1]), SaveSpec("b", HASHES[:3], [0, 1, 4])])
    assert engine.worker.drain(DEADLINE_MS)
    assert engine.worker.counters.take()[metrics.SAVED_BLOCKS_TOTAL] == 3
    check_contents(store, HASHES[:3])
    engine.close()


def test_full_staging_keeps_leading_blocks_and_counts_the_others() -> None:
    store = FakeStore()
    engine = Engine(store, staging_size_bytes=2 * LAYER_BYTES)
    store.delay_ms = 20
    engine.step(saves=[SaveSpec("r", HASHES, [0, 1, 2, 3], followed=True)])
    assert engine.worker.drain(DEADLINE_MS)
    store.delay_ms = 0
    assert engine.worker.counters.take()[metrics.SAVE_SKIPPED_STAGING_TOTAL] >= 2
    for block_hash, data in stored(store).items():
        assert data == expected(next(h for h in HASHES if name_of(h) == block_hash))
    assert all(item.sealed for item in store.objects.values()), "a lost block keeps no reservation"

    def all_slots_are_free(layer: int) -> None:
        saver = engine.worker._saver
        assert saver is not None
        deadline = time.monotonic() + 20
        while saver._staging.num_free < 2:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    engine.step(saves=[SaveSpec("r", HASHES[:2], [0, 1])], before_layer=all_slots_are_free)
    assert engine.worker.drain(DEADLINE_MS)
    check_contents(store, HASHES[:2])
    engine.close()


def test_staging_smaller_than_one_layer_disables_with_a_reason() -> None:
    engine = Engine(FakeStore(), staging_size_bytes=10)
    assert "staging_size_bytes" in engine.worker.answer.reason
    assert engine.worker.answer.namespace == b""
    engine.step(saves=[SaveSpec("r", HASHES, [0, 1, 2, 3])])
    engine.close()


@pytest.mark.parametrize("status", [Status.FULL, Status.TOO_LARGE, Status.UNAVAILABLE])
def test_who_follows_a_block_that_finds_no_room_is_woken_at_once(status: Status) -> None:
    store = FakeStore()
    prefill, decode = Engine(store), Engine(store)
    _, _ = decode.step(loads=[LoadSpec("d", HASHES[:1], [2], LoadMode.FOLLOW, DEADLINE_MS)])
    store.fail_next("reserve", status)
    prefill.step(saves=[SaveSpec("p", HASHES[:1], [0], followed=True)])
    assert decode.until_finished("d") == {2}
    assert decode.is_zero(2)
    prefill.close()
    decode.close()


def test_a_failed_write_gives_the_block_up_and_saves_the_others() -> None:
    store = FakeStore()
    engine = Engine(store)
    store.fail_next("write", Status.ABANDONED)
    engine.save(HASHES[:3], [0, 1, 2])
    assert engine.worker.counters.take()[metrics.SAVE_FAILED_BLOCKS_TOTAL] == 1
    assert all(item.sealed for item in store.objects.values())
    assert len(stored(store)) == 2
    engine.save(HASHES[:3], [0, 1, 2])
    check_contents(store, HASHES[:3])
    engine.close()


def test_a_store_that_is_down_costs_nothing_but_a_counter_and_is_used_when_back() -> None:
    store = FakeStore()
    engine = Engine(store)
    store.stop()
    engine.save(HASHES, [0, 1, 2, 3])
    assert engine.worker.counters.take()[metrics.SAVE_FAILED_BLOCKS_TOTAL] == 4
    store.start()
    engine.save(HASHES, [0, 1, 2, 3])
    check_contents(store, HASHES)
    engine.close()


def test_who_follows_a_step_that_is_skipped_is_told_but_not_by_the_engines_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mooncake_connector.saver.MAX_STEPS_QUEUED", 1)
    engine = Engine(FakeStore())
    is_let_go, is_told = threading.Event(), threading.Event()
    told_by: list[tuple[threading.Thread, int]] = []
    reserve = engine.client.reserve

    def slow_reserve(*args: Any, **kwargs: Any) -> Any:
        is_let_go.wait(60)
        return reserve(*args, **kwargs)

    def abort(keys: Sequence[bytes]) -> None:
        told_by.append((threading.current_thread(), len(keys)))
        is_told.set()

    monkeypatch.setattr(engine.client, "reserve", slow_reserve)
    monkeypatch.setattr(engine.client, "abort", abort)
    engine.step(saves=[SaveSpec("first", HASHES[:1], [0])])
    engine.step(saves=[SaveSpec("skipped", HASHES[1:2], [1]), SaveSpec("leg", HASHES[2:4], [2, 3], True)])
    assert told_by == []
    is_let_go.set()
    assert is_told.wait(60)
    assert engine.worker.drain(DEADLINE_MS)
    assert [num_keys for _, num_keys in told_by] == [2]
    assert told_by[0][0] is not threading.current_thread()
    assert engine.worker.counters.take()[metrics.SAVE_SKIPPED_STAGING_TOTAL] == 3
    engine.close()


def test_only_the_first_of_ranks_that_hold_the_same_kv_saves() -> None:
    store = FakeStore()
    first, second = (
        Engine(store, facts=engine_facts(tp_rank=rank, tp_size=2, kv_replicas=2)) for rank in range(2)
    )
    second.save(HASHES, [0, 1, 2, 3])
    assert not store.objects
    first.save(HASHES, [0, 1, 2, 3])
    check_contents(store, HASHES)
    assert second.load(LoadSpec("r", HASHES, [8, 9, 10, 11], LoadMode.ASYNC, DEADLINE_MS)) == set()
    assert all(second.holds(8 + index, block_hash) for index, block_hash in enumerate(HASHES))
    first.close()
    second.close()


def test_shutdown_waits_for_layers_on_their_way() -> None:
    store = FakeStore()
    store.delay_ms = 30
    engine = Engine(store)
    engine.step(saves=[SaveSpec("r", HASHES, [0, 1, 2, 3])])
    engine.close()
    check_contents(store, HASHES)


def test_shutdown_does_not_wait_for_ever() -> None:
    store = FakeStore()
    engine = Engine(store, drain_timeout_ms=50)
    store.delay_ms = 5_000
    engine.step(saves=[SaveSpec("r", HASHES, [0, 1, 2, 3])])
    closer = threading.Thread(target=engine.close)
    closer.start()
    closer.join(4)
    assert not closer.is_alive()


def test_a_bug_in_the_save_thread_is_counted_and_the_next_step_is_saved() -> None:
    store = FakeStore()
    engine = Engine(store)
    reserve, engine.client.reserve = engine.client.reserve, None  # type: ignore[method-assign, assignment]
    engine.save(HASHES[:1], [0])
    engine.client.reserve = reserve  # type: ignore[method-assign]
    assert engine.worker.counters.take()[metrics.HOOK_ERRORS_TOTAL] == 1
    engine.save(HASHES, [0, 1, 2, 3])
    check_contents(store, HASHES)
    engine.close()


@settings(max_examples=40, deadline=None)
@given(
    steps=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True), max_size=5),
    slots=st.integers(1, 30),
    faults=st.lists(st.sampled_from([("reserve", Status.FULL), ("write", Status.ABANDONED)]), max_size=3),
)
def test_whatever_goes_wrong_only_whole_and_right_blocks_are_visible(
    steps: list[list[int]], slots: int, faults: list[tuple[str, Status]]
) -> None:
    store = FakeStore()
    engine = Engine(store, staging_size_bytes=slots * LAYER_BYTES)
    for operation, status in faults:
        store.fail_next(operation, status)
    for blocks in steps:
        engine.step(saves=[SaveSpec("r", [HASHES[block] for block in blocks], blocks)])
    assert engine.worker.drain(DEADLINE_MS)
    by_name = {name_of(block_hash): expected(block_hash) for block_hash in HASHES}
    assert all(data == by_name[name] for name, data in stored(store).items())
    assert all(item.sealed for item in store.objects.values())
    engine.close()


@given(st.lists(st.integers(0, 6), max_size=30), st.integers(1, 8))
def test_staging_never_hands_out_a_slot_twice(wishes: list[int], num_slots: int) -> None:
    staging = Staging(16, 16 * num_slots + 3)
    held: list[list[int]] = []
    for wish in wishes:
        taken = staging.take(wish)
        assert len(taken) == min(wish, num_slots - sum(map(len, held)))
        held.append(taken)
        flat = [slot for slots in held for slot in slots]
        assert len(flat) == len(set(flat))
        if len(held) > 2:
            staging.give(held.pop(0))
    for slots in held:
        staging.give(slots)
    assert staging.num_free == num_slots


def test_staging_without_room_for_one_slot_says_what_to_change() -> None:
    with pytest.raises(ConfigError, match="staging_size_bytes"):
        Staging(100, 99)
    assert len(Staging(100, 100).rows.row(0)) == 100
