"""A KV cache on a device: copies keep their order with the engine's own work, whatever is done first."""

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore import metrics
from kvcore.client.fake import FakeStore
from mooncake_connector.device import Lane
from mooncake_connector.kv_memory import REACHED, plain_rows
from mooncake_connector.load_ring import LoadRing
from mooncake_connector.metadata import LoadMode, LoadSpec, SaveSpec, StepPlan
from tests.unit.mooncake_connector.fake_device import staged_memory
from tests.unit.mooncake_connector.rig import (
    DEADLINE_MS,
    NUM_LAYERS,
    Engine,
    block_hashes,
    engine_facts,
    kv_bytes,
    make_layers,
    name_of,
)

HASHES = block_hashes(range(24))
BLOCKS = [9, 4, 11, 2, 13, 6]
FAVOURITES = [(Lane.COMPUTE,), (Lane.SAVE,), (Lane.LOAD,), ()]
any_order = pytest.mark.parametrize("favourite", FAVOURITES)


@pytest.fixture(autouse=True, scope="module")
def on_a_device() -> Iterator[None]:
    Engine.ring_blocks = 4
    yield
    Engine.ring_blocks = 0


def expected(block_hash: bytes) -> bytes:
    return b"".join(kv_bytes(block_hash, layer).tobytes() for layer in range(NUM_LAYERS))


def check_contents(store: FakeStore, hashes: Sequence[bytes]) -> None:
    stored = {key[16:]: bytes(item.data) for key, item in store.objects.items() if item.sealed}
    assert stored == {name_of(block_hash): expected(block_hash) for block_hash in hashes}


def filled_store(hashes: Sequence[bytes] = HASHES) -> FakeStore:
    store = FakeStore()
    writer = Engine(store)
    if hashes:
        writer.save(hashes, list(range(len(hashes))))
    writer.close()
    return store


def load_spec(mode: LoadMode, hashes: list[bytes] = HASHES, timeout_ms: float = DEADLINE_MS) -> LoadSpec:
    return LoadSpec("r", hashes, BLOCKS[: len(hashes)], mode, timeout_ms)


def device_holds(engine: Engine, block_id: int, block_hash: bytes) -> bool:
    """As Engine.holds, but without letting the device finish its work first."""
    return all(
        np.array_equal(array[block_id], kv_bytes(block_hash, layer))
        for layer, array in enumerate(engine.layers.values())
    )


# ---- order of copies and the engine's work


@any_order
def test_the_next_step_overwrites_blocks_only_after_they_were_copied(favourite: Sequence[Lane]) -> None:
    store = FakeStore()
    engine = Engine(store, favourite=favourite)
    for begin in range(0, 6, 2):
        hashes = HASHES[begin : begin + 2]
        engine.step(saves=[SaveSpec("r", hashes, [0, 1])])
        engine.overwrite([0, 1], 99)
    assert engine.worker.drain(DEADLINE_MS)
    check_contents(store, HASHES)
    engine.close()


@any_order
def test_blocks_of_an_abandoned_step_are_copied_before_they_are_overwritten_too(
    favourite: Sequence[Lane],
) -> None:
    """Their slots may belong to another step by then, but its copies come later in the same lane."""
    store = FakeStore()
    engine = Engine(store, favourite=favourite)
    worker = engine.worker
    worker.begin_step(StepPlan([], [SaveSpec("r", HASHES[:2], [0, 1])]))
    worker.save_layer("model.layers.0.attn")
    worker._distrust_step()
    worker.end_step()
    engine.step(saves=[SaveSpec("r", HASHES[2:4], [0, 1])])
    engine.overwrite([0, 1], 99)
    assert worker.drain(DEADLINE_MS)
    check_contents(store, HASHES[2:4])
    engine.close()


@any_order
@pytest.mark.parametrize("mode", list(LoadMode))
def test_blocks_are_loaded_after_the_work_that_still_uses_them(
    favourite: Sequence[Lane], mode: LoadMode
) -> None:
    engine = Engine(filled_store(), favourite=favourite)
    seen: list[Any] = []
    for array in engine.layers.values():
        engine.queue(lambda array=array: seen.append(array[BLOCKS].copy()))
    engine.overwrite(BLOCKS, 77)
    assert engine.load(load_spec(mode)) == set()
    assert all(engine.holds(block, block_hash) for block, block_hash in zip(BLOCKS, HASHES, strict=True))
    assert len(seen) == NUM_LAYERS
    assert all((values == 255).all() for values in seen), "overwritten while it was still in use"
    engine.close()


@any_order
@pytest.mark.parametrize("mode", [LoadMode.ASYNC, LoadMode.FOLLOW])
@pytest.mark.parametrize("num_held", [6, 3])
def test_a_load_is_reported_when_its_bytes_and_zeros_are_on_the_device(
    favourite: Sequence[Lane], mode: LoadMode, num_held: int
) -> None:
    engine = Engine(filled_store(HASHES[:num_held]), favourite=favourite)
    lost = engine.load(load_spec(mode, timeout_ms=DEADLINE_MS if num_held == 6 else 200))
    assert lost == set(BLOCKS[num_held:])
    assert all(device_holds(engine, BLOCKS[i], HASHES[i]) for i in range(num_held))
    assert not any(array[block_id].any() for block_id in lost for array in engine.layers.values())
    engine.close()


@any_order
@pytest.mark.parametrize("num_held", [6, 3, 0])
def test_attention_to_a_layer_comes_after_its_synchronous_load(
    favourite: Sequence[Lane], num_held: int
) -> None:
    store = filled_store(HASHES[:num_held])
    engine = Engine(store, favourite=favourite)
    store.delay_ms = 10  # the engine is ahead of the store, as it is with a fast model
    worker = engine.worker
    attended: list[list[Any]] = []
    worker.begin_step(StepPlan([load_spec(LoadMode.SYNC)], []))
    worker.start_loads()
    for name, array in engine.layers.items():
        worker.wait_layer(name)
        engine.queue(lambda array=array: attended.append([array[block].copy() for block in BLOCKS]))
    worker.end_step()
    worker.take_finished(set())
    assert worker.take_failed_blocks() == set(BLOCKS[num_held:])
    engine.finish_device()
    assert len(attended) == NUM_LAYERS
    for layer, blocks in enumerate(attended):
        for index, block in enumerate(blocks):
            wanted = kv_bytes(HASHES[index], layer) if index < num_held else np.zeros_like(block)
            assert np.array_equal(block, wanted), (layer, index)
    engine.close()


@settings(max_examples=40, deadline=None)
@given(
    steps=st.lists(st.tuples(st.booleans(), st.integers(1, 6)), min_size=1, max_size=6),
    slots=st.integers(6, 40),
    seed=st.integers(0, 2**16),
    favourite=st.sampled_from(FAVOURITES),
)
def test_blocks_that_go_from_saves_to_loads_and_back_never_mix(
    steps: list[tuple[bool, int]], slots: int, seed: int, favourite: Sequence[Lane]
) -> None:
    """All steps use the same few blocks, as an engine under pressure does."""
    store = filled_store(HASHES[:3])
    engine = Engine(
        store,
        favourite=favourite,
        seed=seed,
        staging_size_bytes=slots * len(expected(HASHES[0])) // NUM_LAYERS,
    )
    for saves, count in steps:
        if saves:
            engine.step(saves=[SaveSpec("s", HASHES[:count], list(range(count)))])
        else:
            hashes = HASHES[: min(count, 3)]
            assert (
                engine.load(LoadSpec("r", hashes, list(range(len(hashes))), LoadMode.ASYNC, DEADLINE_MS))
                == set()
            )
            assert all(device_holds(engine, index, each) for index, each in enumerate(hashes))
        engine.overwrite(range(6), 99)
    assert engine.worker.drain(DEADLINE_MS)
    known = {name_of(block_hash): expected(block_hash) for block_hash in HASHES}
    assert all(bytes(item.data) == known[key[16:]] for key, item in store.objects.items() if item.sealed)
    assert {key[16:] for key in store.objects} >= {name_of(block_hash) for block_hash in HASHES[:3]}
    engine.close()


# ---- bounds


def test_followers_that_wait_for_their_prefill_hold_no_room() -> None:
    engine = Engine(filled_store(HASHES[:2]))
    waiting = [
        LoadSpec(f"w{i}", block_hashes(range(100 + i, 104 + i)), [i], LoadMode.FOLLOW, DEADLINE_MS)
        for i in range(8)
    ]
    engine.step(loads=waiting)
    late = LoadSpec("late", HASHES[:2], [14, 15], LoadMode.FOLLOW, DEADLINE_MS)
    assert engine.load(late) == set()
    assert engine.holds(14, HASHES[0])
    finished, lost = engine.step(finished={spec.request_id for spec in waiting})
    while len(finished) < len(waiting):
        more, failed = engine.step()
        finished |= more
        lost |= failed
    assert lost == set(range(8))
    engine.close()


def test_loads_that_find_no_room_in_their_time_are_lost_and_the_room_comes_back() -> None:
    engine = Engine(filled_store())
    rings = rings_of(engine)
    taken = [[ring.take(0) for _ in range(ring.num_free)] for ring in rings]
    assert engine.load(load_spec(LoadMode.ASYNC, timeout_ms=50)) == set(BLOCKS)
    assert all(engine.is_zero(block_id) for block_id in BLOCKS)
    for ring, rows in zip(rings, taken, strict=True):
        for row in rows:
            assert row is not None
            ring.give(row, REACHED)
    for mode in LoadMode:
        assert engine.load(load_spec(mode)) == set()
    assert [ring.num_free for ring in rings] == [len(rows) for rows in taken], "every buffer came back"
    engine.close()


def rings_of(engine: Engine) -> list[LoadRing]:
    memory: Any = engine.worker._memory
    return [memory._sealed, memory._followed]


@pytest.mark.parametrize("mode", list(LoadMode))
@pytest.mark.parametrize("method", ["scatter", "mark", "order"])
def test_a_device_that_fails_costs_the_load_and_no_room(mode: LoadMode, method: str) -> None:
    store = filled_store()
    engine = Engine(store)
    assert engine.device is not None
    works = getattr(engine.device, method)

    def fails_once(*args: Any) -> Any:
        setattr(engine.device, method, works)
        raise RuntimeError("device error")

    setattr(engine.device, method, fails_once)
    if mode is LoadMode.SYNC:
        on_top = SaveSpec("r", block_hashes(range(90, 94)), [0])
        assert engine.step(loads=[load_spec(mode)], saves=[on_top])[1] == set(BLOCKS)
    else:
        assert engine.load(load_spec(mode)) == set(BLOCKS)
    untouched = [array[block_id] for block_id in BLOCKS for array in engine.layers.values()]
    engine.finish_device()
    assert all((block == (0 if method == "scatter" else 255)).all() for block in untouched)
    assert engine.worker.counters.take()[metrics.HOOK_ERRORS_TOTAL] >= 1
    assert engine.worker.drain(DEADLINE_MS)
    assert len(store.objects) == len(HASHES), "computed on top of what did not come"
    assert engine.load(load_spec(mode)) == set()
    assert [ring.num_free for ring in rings_of(engine)] == [4, 4]
    engine.close()


@pytest.mark.parametrize("mode", [LoadMode.ASYNC, LoadMode.FOLLOW])
def test_a_load_whose_copies_failed_is_lost(mode: LoadMode) -> None:
    engine = Engine(filled_store())
    assert engine.device is not None
    works = engine.device.run_until

    def fails_once(mark: Any) -> None:
        assert engine.device is not None
        engine.device.run_until = works  # type: ignore[method-assign]
        raise RuntimeError("device error")

    engine.device.run_until = fails_once  # type: ignore[method-assign]
    assert engine.load(load_spec(mode, HASHES[:2])) == set(BLOCKS[:2])
    assert all(engine.is_zero(block_id) for block_id in BLOCKS[:2])
    assert engine.load(load_spec(mode)) == set()
    engine.close()


@pytest.mark.parametrize("method", ["gather", "mark"])
def test_a_device_that_fails_costs_the_steps_saves_and_no_slot(method: str) -> None:
    store = FakeStore()
    engine = Engine(store)
    saver: Any = engine.worker._saver
    assert engine.device is not None
    works = getattr(engine.device, method)

    def fails(*args: Any) -> Any:
        raise RuntimeError("device error")

    worker = engine.worker
    worker.begin_step(StepPlan([], [SaveSpec("r", HASHES[:2], [0, 1])]))
    setattr(engine.device, method, fails)
    worker.guard.call(None, worker.save_layer, "model.layers.0.attn")
    setattr(engine.device, method, works)
    worker.save_layer("model.layers.1.attn")
    worker.end_step()
    assert worker.drain(DEADLINE_MS)
    assert not store.objects, "no reservation is left behind"
    assert worker.counters.take()[metrics.HOOK_ERRORS_TOTAL] == 1
    engine.save(HASHES, [0, 1, 2, 3, 4, 5])
    check_contents(store, HASHES)
    assert saver._staging.num_free == saver._staging.num_slots
    engine.close()


@pytest.mark.parametrize(("ring_blocks", "fits"), [(1, True), (0.4, False)])
def test_room_for_less_than_one_block_a_ring_is_refused(ring_blocks: float, fits: bool) -> None:
    layers = make_layers()
    block_size_bytes = len(expected(HASHES[0]))

    def memory() -> Any:
        return staged_memory(layers, 16, int(2 * ring_blocks * block_size_bytes))[0]

    engine = Engine(FakeStore())
    engine.worker.register(memory, engine_facts)
    assert bool(engine.worker.answer.namespace) is fits
    assert fits or "load_staging_size_bytes" in engine.worker.answer.reason
    engine.close()


# ---- the ring alone


def test_a_ring_hands_out_the_buffer_that_came_back_first_after_its_copies() -> None:
    class Copies:
        waited = False

        def wait(self) -> None:
            self.waited = True

    ring = LoadRing(plain_rows(12, 4), first_row=6, num_buffers=2, buffer_rows=3)
    assert [ring.take(0), ring.take(0), ring.take(0)] == [6, 9, None]
    first, second = Copies(), Copies()
    ring.give(9, first)
    ring.give(6, second)
    assert ring.take(0) == 9
    assert (first.waited, second.waited) == (True, False)


def test_who_waits_for_a_buffer_gets_the_next_one_that_is_given_back() -> None:
    ring = LoadRing(plain_rows(1, 4), first_row=0, num_buffers=1, buffer_rows=1)
    assert ring.take(0) == 0
    got: list[int | None] = []
    waiter = threading.Thread(target=lambda: got.append(ring.take(DEADLINE_MS)))
    waiter.start()
    time.sleep(0.02)
    assert got == []
    ring.give(0, REACHED)
    waiter.join(20)
    assert got == [0]


def test_a_buffer_whose_copies_failed_is_not_lost() -> None:
    class Failed:
        def wait(self) -> None:
            raise RuntimeError("device error")

    ring = LoadRing(plain_rows(1, 4), first_row=0, num_buffers=1, buffer_rows=1)
    ring.take(0)
    ring.give(0, Failed())
    with pytest.raises(RuntimeError):
        ring.take(0)
    assert ring.take(0) == 0


def test_a_landing_larger_than_a_buffer_is_refused() -> None:
    memory, _ = staged_memory(make_layers(), 16, 8 * len(expected(HASHES[0])))
    assert memory.max_blocks(NUM_LAYERS) == 1
    assert memory.max_blocks(1) == NUM_LAYERS
    with pytest.raises(ValueError, match="max_blocks"):
        memory.land([0, 1], 0, NUM_LAYERS, timeout_ms=0)
