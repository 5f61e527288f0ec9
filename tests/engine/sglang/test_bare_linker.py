"""The linker with SGLang's device pools: every byte goes to the store and comes back, layer by layer."""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_hicache_backend import device_mover
from sglang_hicache_backend.attachment import Attachment
from sglang_hicache_backend.keys import EngineFacts, RankFacts
from tests.engine.rig import StoreProcess
from tests.engine.sglang.bare import (
    DevicePages,
    DevicePoolEntry,
    LinkedEngine,
    PoolName,
    PoolTransfer,
    SideStream,
    suite_extra_config,
    torch,
)

pytestmark = pytest.mark.sglang

NewEngine = Callable[..., LinkedEngine]
HASHES = [hashlib.sha256(bytes([number])).hexdigest() for number in range(4)]


@pytest.fixture
def new_engine(shared_store: StoreProcess, request: pytest.FixtureRequest) -> Iterator[NewEngine]:
    engines: list[LinkedEngine] = []

    def make(kind: str, **extra: Any) -> LinkedEngine:
        tag = {"extra_backend_tag": request.node.name}
        engines.append(LinkedEngine(kind, suite_extra_config(shared_store, **tag, **extra)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.linker.close()


def save(engine: LinkedEngine, transfers: list[PoolTransfer]) -> bool:
    assert engine.linker.offload(transfers)
    engine.wait(lambda: engine.linker.num_completed_offloads() == 1)
    return bool(engine.linker.pop_completed_offload())


def load(engine: LinkedEngine, transfers: list[PoolTransfer]) -> bool:
    assert engine.linker.load("request", transfers)
    index = engine.linker.start_layer_wise_loading()
    engine.linker.layer_done_counter.set_consumer(index)
    for layer in range(engine.linker.layer_done_counter.num_layers):
        engine.linker.layer_done_counter.wait_until(layer)
    return bool(engine.linker.finish_layer_wise_loading(index))


@pytest.mark.parametrize("kind, pools", [("full", ["kv"]), ("swa", ["kv", "swa"])])
@pytest.mark.parametrize("stage_bytes", [1, 32 << 20], ids=["one page at a time", "all pages at once"])
def test_every_byte_of_every_pool_arrives(
    new_engine: NewEngine, kind: str, pools: list[str], stage_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_mover, "STAGE_BYTES", stage_bytes)
    first, second = new_engine(kind), new_engine(kind)
    first.fill(seed=7)
    second.fill(seed=None)
    assert second.linker.lookup("request", first.transfers(pools, HASHES, ())) == []
    assert save(first, first.transfers(pools, HASHES, (3, 9, 1, 5)))
    assert second.linker.lookup("request", first.transfers(pools, HASHES, ())) == [1, 2, 3, 4]
    assert load(second, second.transfers(pools, HASHES, (2, 3, 7, 8)))
    for name in pools:
        for number, (before, after) in enumerate(zip(first.tensors(name), second.tensors(name), strict=True)):
            for origin, place in ((3, 2), (9, 3), (1, 7), (5, 8)):
                assert torch.equal(first.page(before, origin), second.page(after, place)), f"{name} {number}"
            assert not torch.any(second.page(after, 4))


def test_layers_of_different_sizes_come_together_with_the_first(shared_store: StoreProcess) -> None:
    """And only at layers that the pool has: the engine's other layers wait for nothing."""
    config = suite_extra_config(shared_store, extra_backend_tag="uneven")
    suite = Attachment(
        config, RankFacts(), lambda config: EngineFacts(architecture="", weights_id="", engine="")
    )
    sides = []
    for seed in (1, 2):
        generator = torch.Generator().manual_seed(seed)
        tensors = [torch.randint(0, 256, (12, width), generator=generator).byte() for width in (8, 24)]
        entry = DevicePoolEntry(
            name=PoolName.KV,
            indices_from_pool=PoolName.KV,
            device_pool=None,
            components=[tensors],
            layer_mapping={1: 0, 3: 1},
            page_size=2,
            rows_are_pages=False,
        )
        sides.append((tensors, {"kv": DevicePages(entry, "kv", is_replicated=False)}))
    (sent, source), (got, target) = sides
    suite.add_device_pools([source["kv"].facts])
    assert suite.store is not None
    cpu, stream = torch.device("cpu"), SideStream(None, torch.device("cpu"))
    run = device_mover.PageRun("kv", HASHES[:2], source["kv"].rows(torch.tensor([6, 7, 2, 3])))
    assert device_mover.PageSaver(suite.store, source, cpu, stream).save(run)
    loader = device_mover.LayerLoader(suite.store, target, cpu, stream, timeout_ms=60_000)
    layers: list[int] = []
    loader.load([run._replace(rows=[0, 10])], 5, layers.append)
    assert layers == [0, 1, 2, 3, 4]
    for before, after in zip(sent, got, strict=True):
        assert torch.equal(after[[0, 1, 10, 11]], before[[6, 7, 2, 3]])
    suite.close()


def test_a_window_bounds_the_prefix(new_engine: NewEngine) -> None:
    engine = new_engine("swa")
    engine.fill(seed=1)
    assert save(engine, engine.transfers(["kv"], HASHES, (1, 2, 3, 4)))
    assert save(engine, engine.transfers(["kv", "swa"], HASHES[2:3], (3,)))
    query = engine.transfers(["kv", "swa"], HASHES, ())
    query[1].keys = HASHES[-1:]
    query[1].hit_policy = type(query[1].hit_policy).TRAILING_PAGES
    assert engine.linker.lookup("request", query) == [3]


def test_a_page_that_is_gone_fails_its_load_and_no_other(new_engine: NewEngine) -> None:
    engine = new_engine("full")
    engine.fill(seed=1)
    assert save(engine, engine.transfers(["kv"], HASHES[:2], (1, 2)))
    assert not load(engine, engine.transfers(["kv"], HASHES[:3], (4, 5, 6)))
    assert load(engine, engine.transfers(["kv"], HASHES[:2], (4, 5)))


def test_without_a_store_there_is_nothing_and_nothing_waits(tmp_path: Path) -> None:
    store = StoreProcess(tmp_path)
    engine = LinkedEngine("full", suite_extra_config(store))
    try:
        engine.fill(seed=1)
        assert save(engine, engine.transfers(["kv"], HASHES, (1, 2, 3, 4)))
        store.kill()
        engine.wait(lambda: engine.linker.lookup("request", engine.transfers(["kv"], HASHES, ())) == [])
        assert not save(engine, engine.transfers(["kv"], HASHES, (1, 2, 3, 4)))
        # It was found, and then the store died: SGLang aborts the request that waits for it.
        assert not load(engine, engine.transfers(["kv"], HASHES, (5, 6, 7, 8)))
    finally:
        engine.linker.close()
        store.close()


def test_a_cancelled_load_does_not_start(new_engine: NewEngine) -> None:
    engine = new_engine("full")
    assert engine.linker.load("request", engine.transfers(["kv"], HASHES, (1, 2, 3, 4)))
    assert engine.linker.cancel_queued_load("request")
    assert not engine.linker.cancel_queued_load("request")
    assert engine.linker.start_layer_wise_loading() == -1


def test_what_is_unusable_leaves_a_linker_without_pages(new_engine: NewEngine) -> None:
    engine = new_engine("full", load_timeout_ms="never")
    assert engine.linker.lookup("request", engine.transfers(["kv"], HASHES, ())) == []
    assert not save(engine, engine.transfers(["kv"], HASHES, (1, 2, 3, 4)))
    engine.linker.reset()
    assert engine.linker.num_completed_offloads() == 0
