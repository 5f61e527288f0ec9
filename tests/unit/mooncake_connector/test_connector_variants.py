"""KV computed with other weights than the checkpoint's is never taken for KV computed with those."""

import io
import json
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvcore.client.fake import FakeStore
from kvcore.keys import block_keys, variant_namespace
from kvcore.weights import model_directory, weights_identity
from mooncake_connector.lookup import ANSWER_LIFETIME_SECONDS, PrefixLookup
from mooncake_connector.metadata import LoadMode, LoadSpec, SaveSpec, StepPlan
from mooncake_connector.variants import Variants
from tests.unit.mooncake_connector.rig import BLOCK_TOKENS, DEADLINE_MS, Engine, Request, block_hashes
from tests.unit.mooncake_connector.scheduler_rig import DECODE, NAMESPACES, Rig
from tests.unit.mooncake_connector.test_connector_namespace import write_checkpoint

BLOCKS = [1, 2, 3, 4, 5, 6]


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.side.shutdown()


def adapter(path: Path, lora_id: int = 1) -> Any:
    return SimpleNamespace(lora_name="sql", lora_int_id=lora_id, lora_path=str(path))


def lora_request(request_id: str, path: Path) -> Request:
    request = Request(request_id, range(22))
    request.lora_request = adapter(path)
    return request


def prefill(rig: Rig, request: Request) -> StepPlan:
    """Schedules all of a prompt of which nothing is loaded."""
    rig.alloc(request, BLOCKS, 0)
    return rig.prefill_step(request, BLOCKS, 0, 22)


def store_saves(rig: Rig, plan: StepPlan) -> None:
    """What a worker with one rank does with the saves of a plan."""
    for save in plan.saves:
        namespace = variant_namespace(NAMESPACES[0], save.variant)
        keys = block_keys(namespace, save.block_hashes)
        rig.client.reserve(keys, 8, 1)
        rig.client.write_layers(keys, 0, 1, [bytearray(8)] * len(keys)).wait()


# ---- adapters


def test_adapters_of_one_name_and_path_are_told_apart_by_their_weights(rig: Rig, tmp_path: Path) -> None:
    path = tmp_path / "sql"
    write_checkpoint(path, value=1)
    request = lora_request("first", path)
    assert rig.side.match(request, 0) == (0, False)
    store_saves(rig, prefill(rig, request))
    assert rig.side.match(lora_request("again", path), 0) == (5 * BLOCK_TOKENS, True)

    # The adapter is trained on and saved at the same place; another engine is started with it.
    retrained = Rig()
    retrained.client, retrained.side._lookup = rig.client, rig.side._lookup
    write_checkpoint(tmp_path / "new", value=3)
    (tmp_path / "new").rename(tmp_path / "sql-new")
    path.rename(tmp_path / "sql-old")
    (tmp_path / "sql-new").rename(path)
    assert retrained.side.match(lora_request("other weights", path), 0) == (0, False)
    assert retrained.side.match(Request("no adapter", range(22)), 0) == (0, False)


def test_an_adapter_that_nobody_can_identify_is_not_shared(rig: Rig, tmp_path: Path) -> None:
    request = lora_request("r", tmp_path / "only in memory")
    rig.side.on_new_request(request)
    assert rig.side.match(request, 0) == (0, False)
    assert prefill(rig, request).saves == []
    rig.side.request_finished(request)


def test_an_adapter_whose_files_change_is_shared_no_more(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "sql", value=1)
    variants = Variants()
    assert variants.of(adapter(path))
    os.utime(path / "model.safetensors", ns=(1, 1))
    assert variants.of(adapter(path)) is None
    assert variants.of(adapter(path)) is None, "the engine may have loaded it before or after"
    assert variants.of(adapter(path, lora_id=2)), "an adapter that was loaded just now"


def test_an_adapter_with_broken_files_is_not_shared(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.bin").write_bytes(b"no archive")
    assert Variants().of(adapter(tmp_path)) is None


def test_adapters_saved_by_torch_are_told_apart(tmp_path: Path) -> None:
    def save(name: str, tensor: bytes, archive_name: str = "adapter_model") -> str | None:
        directory = tmp_path / name
        directory.mkdir()
        (directory / "adapter_config.json").write_text(json.dumps({"r": 8}))
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w") as archive:
            archive.writestr(f"{archive_name}/data.pkl", b"names and shapes")
            archive.writestr(f"{archive_name}/data/0", tensor)
        (directory / "adapter_model.bin").write_bytes(content.getvalue())
        return weights_identity(str(directory))

    first = save("first", b"\1" * 4096)
    assert first is not None
    assert save("copy", b"\1" * 4096, archive_name="archive") == first
    assert save("tuned", b"\1" * 4095 + b"\2") != first


# ---- names of repositories


def test_the_name_of_a_repository_leads_to_its_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    folder = tmp_path / "models--some--model"
    snapshot = write_checkpoint(folder / "snapshots" / commit)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    assert model_directory("some/model", cache_dir=str(tmp_path)) == snapshot
    assert model_directory("some/model", commit, str(tmp_path)) == snapshot
    assert model_directory("some/other", cache_dir=str(tmp_path)) is None
    assert model_directory("neither a path: nor a name", cache_dir=str(tmp_path)) is None
    assert model_directory(str(snapshot)) == snapshot


# ---- after a reset


def test_after_a_reset_nothing_of_before_is_found_or_saved(rig: Rig) -> None:
    request = Request("before", range(22))
    rig.put(request, range(3))
    assert rig.side.match(request, 0) == (3 * BLOCK_TOKENS, True)
    rig.alloc(request, BLOCKS, 0)
    rig.prefill_step(request, BLOCKS, 0, 6)

    assert rig.side.reset()
    # What it computed so far is that of other weights, and what it computes now stands on it.
    plan = rig.next_step(request, None, 6, 16)
    assert (plan.saves, plan.distrusts_loads) == ([], True)
    fresh = Request("fresh", range(22))
    assert rig.side.match(fresh, 0) == (0, False)
    plan = prefill(rig, fresh)
    assert (len(plan.saves), plan.distrusts_loads) == (1, False)
    store_saves(rig, plan)
    assert rig.side.match(Request("again", range(22)), 0) == (5 * BLOCK_TOKENS, True)
    # Preempted, it is computed from the beginning, with the weights of now.
    request.num_preemptions = 1
    assert rig.side.match(request, 0) == (5 * BLOCK_TOKENS, True)


def test_engines_that_were_reset_do_not_share(rig: Rig) -> None:
    other = Rig()
    other.side._lookup = rig.side._lookup
    for side in (rig.side, other.side):
        assert side.reset()
    request = Request("r", range(22))
    rig.side.match(request, 0)
    store_saves(rig, prefill(rig, request))
    assert rig.side.match(Request("mine", range(22)), 0) == (5 * BLOCK_TOKENS, True)
    assert other.side.match(Request("not mine", range(22)), 0) == (0, False)


def test_after_a_reset_nobody_waits_for_a_prefill_engine(rig: Rig) -> None:
    assert rig.side.match(Request("before", range(22), DECODE), 0) == (5 * BLOCK_TOKENS, True)
    rig.side.reset()
    assert rig.side.match(Request("after", range(22), DECODE), 0) == (0, False)


def test_a_load_under_way_at_a_reset_brings_nothing() -> None:
    store = FakeStore()
    writer, reader = Engine(store), Engine(store)
    hashes = block_hashes(range(2 * BLOCK_TOKENS))
    writer.save(hashes, [1, 2])
    store.delay_ms = 300
    finished, lost = reader.step([LoadSpec("r", hashes, [5, 6], LoadMode.ASYNC, DEADLINE_MS)])
    assert (finished, lost) == (set(), set())
    reader.worker.begin_step(StepPlan(runs_model=False, distrusts_loads=True))
    assert reader.until_finished("r") == {5, 6}
    assert reader.is_zero(5) and reader.is_zero(6)
    writer.close()
    reader.close()


def test_blocks_of_one_variant_are_none_of_another() -> None:
    store = FakeStore()
    writer, reader = Engine(store), Engine(store)
    hashes = block_hashes(range(2 * BLOCK_TOKENS))
    writer.step(saves=[SaveSpec("r", hashes, [1, 2], variant=b"adapter")])
    assert writer.worker.drain(DEADLINE_MS)
    assert reader.load(LoadSpec("plain", hashes, [3, 4], LoadMode.ASYNC, DEADLINE_MS)) == {3, 4}
    same = LoadSpec("same", hashes, [5, 6], LoadMode.ASYNC, DEADLINE_MS, b"adapter")
    assert reader.load(same) == set()
    assert all(
        reader.holds(block_id, block_hash) for block_id, block_hash in zip([5, 6], hashes, strict=True)
    )
    writer.close()
    reader.close()


# ---- asking


def test_an_answer_that_the_scheduler_came_back_for_is_taken_however_long_its_step_was(rig: Rig) -> None:
    request = Request("r", range(22))
    rig.put(request, range(3))
    now = [0.0]
    lookup = PrefixLookup(
        rig.client,
        NAMESPACES[:1],
        rig.side.counters,
        timeout_ms=DEADLINE_MS,
        step_wait_ms=0,
        clock=lambda: now[0],
    )
    hashes = request.block_hashes
    asked: list[int] = []

    def hashes_from(first: int) -> list[bytes]:
        asked.append(first)
        return hashes[first:]

    for _ in range(3):
        lookup.ask("r", b"", hashes)
        lookup._questions["r"].future.result()
        now[0] += 2 * ANSWER_LIFETIME_SECONDS
        # Old by now: it is asked for again, and not there within this step.
        rig.store.delay_ms = 100
        assert lookup.answer("r", b"", hashes_from) is None
        lookup._questions["r"].future.result()
        now[0] += 2 * ANSWER_LIFETIME_SECONDS
        num_asked = len(asked)
        assert lookup.answer("r", b"", hashes_from) == 3
        assert len(asked) == num_asked, "nothing is put together for an answer that is there"
        rig.store.delay_ms = 0
    lookup.close()
