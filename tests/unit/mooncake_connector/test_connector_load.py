"""Loads: bytes land in the engine's blocks, failures are exact, and nothing ever waits for ever."""

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore import metrics
from kvcore.client.fake import FakeStore
from kvcore.keys import block_key
from kvcore.wire.messages import Status
from mooncake_connector.metadata import LoadMode, LoadSpec, SaveSpec, StepPlan
from tests.unit.mooncake_connector.rig import DEADLINE_MS, NUM_LAYERS, Engine, block_hashes, name_of

pytestmark = pytest.mark.usefixtures("memory_kind")
HASHES = block_hashes(range(24))
BLOCKS = [9, 4, 11, 2, 13, 6]


def filled_store(hashes: list[bytes] = HASHES) -> FakeStore:
    store = FakeStore()
    writer = Engine(store)
    writer.save(hashes, list(range(len(hashes))))
    writer.close()
    return store


def load_spec(mode: LoadMode, hashes: list[bytes] = HASHES, timeout_ms: float = DEADLINE_MS) -> LoadSpec:
    return LoadSpec("r", hashes, BLOCKS[: len(hashes)], mode, timeout_ms)


def check_outcome(engine: Engine, lost: set[int], num_hashes: int = len(HASHES)) -> None:
    """Blocks before the first lost one hold their KV, the others are zero."""
    complete = num_hashes - len(lost)
    assert lost == set(BLOCKS[complete:num_hashes])
    assert all(engine.holds(BLOCKS[index], HASHES[index]) for index in range(complete))
    assert all(engine.is_zero(block_id) for block_id in lost)


@pytest.mark.parametrize("batch_blocks", [1, 4, 32])
@pytest.mark.parametrize("mode", [LoadMode.ASYNC, LoadMode.FOLLOW])
def test_asynchronous_loads_fill_the_blocks(mode: LoadMode, batch_blocks: int) -> None:
    engine = Engine(filled_store(), load_batch_blocks=batch_blocks)
    lost = engine.load(load_spec(mode))
    assert lost == set()
    check_outcome(engine, lost)
    assert engine.worker.counters.take()[metrics.LOADED_BLOCKS_TOTAL] == len(HASHES)
    engine.close()


@pytest.mark.parametrize("batch_blocks", [1, 4, 32])
def test_a_synchronous_load_has_each_layer_there_when_it_is_needed(batch_blocks: int) -> None:
    engine = Engine(filled_store(), load_batch_blocks=batch_blocks)
    _, lost = engine.step(loads=[load_spec(LoadMode.SYNC)])
    assert lost == set()
    check_outcome(engine, lost)
    assert engine.worker.take_finished(set()) == set(), "synchronous loads are not reported as finished"
    engine.close()


@pytest.mark.parametrize("mode", list(LoadMode))
@pytest.mark.parametrize("missing", [0, 3, 5])
def test_a_lost_block_takes_those_behind_it_along(mode: LoadMode, missing: int) -> None:
    store = filled_store()
    engine = Engine(store, load_batch_blocks=4)
    store.lose([key for key in store.objects if key[16:] == name_of(HASHES[missing])])
    timeout_ms = 300 if mode is LoadMode.FOLLOW else DEADLINE_MS
    lost = engine.load(load_spec(mode, timeout_ms=timeout_ms))
    assert len(lost) == len(HASHES) - missing
    check_outcome(engine, lost)
    engine.close()


@pytest.mark.parametrize("status", [Status.CORRUPT, Status.UNAVAILABLE, Status.TIMED_OUT])
def test_any_status_but_ok_is_a_loss(status: Status) -> None:
    store = filled_store()
    engine = Engine(store)
    store.fail_next("read", status)
    lost = engine.load(load_spec(LoadMode.ASYNC))
    check_outcome(engine, lost)
    assert len(lost) == len(HASHES)
    engine.close()


def test_a_synchronous_failure_in_a_late_layer_is_reported_in_its_step() -> None:
    store = filled_store()
    engine = Engine(store)

    def before_layer(layer: int) -> None:
        if layer == 1:
            store.stop()

    store.delay_ms = 5
    _, lost = engine.step(loads=[load_spec(LoadMode.SYNC)], before_layer=before_layer)
    check_outcome(engine, lost)
    engine.close()


@pytest.mark.parametrize("mode", [LoadMode.SYNC, LoadMode.ASYNC])
def test_a_store_that_hangs_costs_the_deadline_and_no_more(mode: LoadMode) -> None:
    store = filled_store()
    engine = Engine(store)
    store.delay_ms = 60_000
    lost = engine.load(load_spec(mode, timeout_ms=50))
    assert lost == set(BLOCKS)
    check_outcome(engine, lost)
    engine.close()


def test_nothing_computed_on_top_of_a_failed_synchronous_load_becomes_visible() -> None:
    store = filled_store(HASHES[:2])
    engine = Engine(store)
    tail = SaveSpec("r", HASHES[3:5], [0, 1])
    engine.step(loads=[load_spec(LoadMode.SYNC, HASHES[:3])], saves=[tail])
    assert engine.worker.drain(DEADLINE_MS)
    assert {key[16:] for key in store.objects} == {name_of(HASHES[0]), name_of(HASHES[1])}
    engine.save(HASHES[3:5], [0, 1])
    assert len(store.objects) == 4, "the next step saves again"
    engine.close()


def test_a_decode_engine_has_layer_0_before_the_prefill_engine_computes_the_last(tmp_path: Path) -> None:
    store, trace = FakeStore(), tmp_path / "trace.jsonl"
    prefill, decode = (Engine(store, trace_path=str(trace)) for _ in range(2))
    decode.step(loads=[load_spec(LoadMode.FOLLOW)])
    arrived: list[int] = []

    def before_layer(layer: int) -> None:
        if layer == NUM_LAYERS - 1:
            key_of_layer = threading.Event()

            def poll() -> None:
                while not any(line["event"] == "load_layer_done" for line in read_trace(trace)):
                    if key_of_layer.wait(0.01):
                        return
                arrived.append(layer)

            thread = threading.Thread(target=poll)
            thread.start()
            thread.join(20)
            key_of_layer.set()

    prefill.step(saves=[SaveSpec("p", HASHES, list(range(len(HASHES))), True)], before_layer=before_layer)
    assert arrived == [NUM_LAYERS - 1], "the decode engine waited for the whole block"
    assert decode.until_finished("r") == set()
    check_outcome(decode, set())
    prefill.close()
    decode.close()
    lines = read_trace(trace)
    committed = {(line["block"], line["layer"]): line["ns"] for line in lines if line["event"][0] == "s"}
    loaded = {(line["block"], line["layer"]): line["ns"] for line in lines if line["event"][0] == "l"}
    block = next(iter(committed))[0]
    assert [layer for key, layer in committed if key == block] == list(range(NUM_LAYERS))
    assert loaded[block, 0] < committed[block, NUM_LAYERS - 1]


def read_trace(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_following_works_over_any_chunks_of_the_prefill(chunk: int) -> None:
    store = FakeStore()
    prefill, decode = Engine(store), Engine(store, load_batch_blocks=2)
    decode.step(loads=[load_spec(LoadMode.FOLLOW)])
    for begin in range(0, len(HASHES), chunk):
        hashes = HASHES[begin : begin + chunk]
        prefill.step(saves=[SaveSpec("p", hashes, list(range(begin, begin + len(hashes))), True)])
    assert decode.until_finished("r") == set()
    check_outcome(decode, set())
    prefill.close()
    decode.close()


def test_a_prefill_engine_that_dies_wakes_its_follower_and_the_first_blocks_are_kept() -> None:
    store = FakeStore()
    prefill, decode = Engine(store), Engine(store, load_batch_blocks=2)
    decode.step(loads=[load_spec(LoadMode.FOLLOW)])
    prefill.save(HASHES[:2], [0, 1])
    prefill.client.reserve([key_of(prefill, block_hash) for block_hash in HASHES[2:]], 192, NUM_LAYERS)
    lost: set[int] = set()
    threading.Timer(0.2, prefill.client.close).start()
    lost |= decode.until_finished("r")
    assert len(lost) == len(HASHES) - 2
    check_outcome(decode, lost)
    prefill.close()
    decode.close()


def key_of(engine: Engine, block_hash: bytes) -> bytes:
    return block_key(engine.worker.answer.namespace, block_hash)


def test_a_follower_whose_prefill_never_comes_gives_up_after_its_time() -> None:
    engine = Engine(FakeStore())
    lost = engine.load(load_spec(LoadMode.FOLLOW, timeout_ms=150))
    assert lost == set(BLOCKS)
    check_outcome(engine, lost)
    engine.close()


def test_a_request_that_leaves_ends_its_load_early_and_is_still_reported() -> None:
    engine = Engine(FakeStore())
    engine.step(loads=[load_spec(LoadMode.FOLLOW)])
    finished, lost = engine.step(finished={"r"})
    if not finished:
        lost |= engine.until_finished("r")
    assert lost == set(BLOCKS)
    engine.close()


def test_more_loads_than_threads_take_turns() -> None:
    engine = Engine(filled_store(), load_threads=2)
    specs = [LoadSpec(f"r{i}", HASHES[:2], [2 * i, 2 * i + 1], LoadMode.ASYNC, DEADLINE_MS) for i in range(8)]
    finished, lost = engine.step(loads=specs)
    while len(finished) < len(specs):
        more, failed = engine.step()
        finished |= more
        lost |= failed
    assert lost == set()
    assert all(engine.holds(2 * i + j, HASHES[j]) for i in range(8) for j in range(2))
    engine.close()


def test_a_bug_in_a_load_is_counted_and_the_request_is_reported() -> None:
    engine = Engine(filled_store())
    engine.client.read_layers = None  # type: ignore[method-assign, assignment]
    lost = engine.load(load_spec(LoadMode.ASYNC))
    assert lost == set(BLOCKS)
    assert engine.worker.counters.take()[metrics.HOOK_ERRORS_TOTAL] == 1
    engine.close()


def test_a_load_after_shutdown_is_reported_as_failed() -> None:
    engine = Engine(filled_store())
    loader = engine.worker._loader
    assert loader is not None
    loader.close()
    finished, lost = engine.step(loads=[load_spec(LoadMode.ASYNC)])
    assert (finished, lost) == ({"r"}, set(BLOCKS))
    engine.close()


@settings(max_examples=30, deadline=None)
@given(
    held=st.lists(st.booleans(), min_size=6, max_size=6),
    batch_blocks=st.integers(1, 7),
    mode=st.sampled_from([LoadMode.ASYNC, LoadMode.SYNC]),
)
def test_exactly_the_leading_run_of_what_is_held_arrives(
    held: list[bool], batch_blocks: int, mode: LoadMode
) -> None:
    store = filled_store()
    store.lose([key for key in store.objects if not held[[name_of(h) for h in HASHES].index(key[16:])]])
    engine = Engine(store, load_batch_blocks=batch_blocks)
    lost = engine.load(load_spec(mode))
    leading = held.index(False) if False in held else len(held)
    assert len(lost) == len(HASHES) - leading
    check_outcome(engine, lost)
    engine.close()


def test_a_load_that_never_ends_is_waited_for_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mooncake_connector.loader.TRANSFER_GRACE_MS", 1.0)
    engine = Engine(filled_store())
    stuck = threading.Event()
    monkeypatch.setattr(engine.client, "read_layers", lambda *args, **kwargs: stuck.wait(60))
    loader = engine.worker._loader
    assert loader is not None
    waits: list[float] = []
    wait_for = loader._changed.wait_for

    def counted(condition: Any, timeout: float) -> bool:
        waits.append(timeout)
        return bool(wait_for(condition, timeout))

    monkeypatch.setattr(loader._changed, "wait_for", counted)
    try:
        _, lost = engine.step(loads=[load_spec(LoadMode.SYNC, timeout_ms=1.0)])
    finally:
        stuck.set()
    assert lost == set(BLOCKS)
    assert len([timeout for timeout in waits if timeout > 0]) == 1
    engine.close()


def test_a_failure_that_is_told_a_step_late_spoils_the_saves_of_that_step() -> None:
    """A draft model runs its layer after vLLM has asked for failed blocks, and before end_step."""
    store = filled_store(HASHES[:3])
    engine = Engine(store)
    worker, read_layers = engine.worker, engine.client.read_layers
    has_asked = threading.Event()

    def read(keys: Sequence[bytes], layer_begin: int, *args: Any, **kwargs: Any) -> Any:
        if layer_begin == NUM_LAYERS - 1:
            has_asked.wait(60)
            store.lose(list(store.objects))
        return read_layers(keys, layer_begin, *args, **kwargs)

    engine.client.read_layers = read  # type: ignore[method-assign]
    worker.begin_step(StepPlan([load_spec(LoadMode.SYNC, HASHES[:3])]))
    worker.start_loads()
    for layer in range(NUM_LAYERS - 1):
        worker.wait_layer(f"model.layers.{layer}.attn")
    worker.take_finished(set())
    assert worker.take_failed_blocks() == set()
    has_asked.set()
    worker.end_step()

    tail = SaveSpec("r", HASHES[3:5], [0, 1])
    _, lost = engine.step(saves=[tail])
    assert lost == set(BLOCKS[:3])
    assert worker.drain(DEADLINE_MS)
    assert not store.objects, "it was computed on top of what did not come"
    engine.step(saves=[tail])
    assert worker.drain(DEADLINE_MS)
    assert len(store.objects) == 2
    engine.close()
