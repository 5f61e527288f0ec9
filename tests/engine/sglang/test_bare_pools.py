"""Two of SGLang's caches on one store: every pool's bytes arrive as they were saved, in every layout."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.engine.rig import StoreProcess
from tests.engine.sglang.bare import BareEngine, suite_extra_config, torch

pytestmark = pytest.mark.sglang

NewEngine = Callable[..., BareEngine]


@pytest.fixture
def new_engine(shared_store: StoreProcess, request: pytest.FixtureRequest) -> Iterator[NewEngine]:
    """Engines of one test share their pages with each other and with no other test's."""
    engines: list[BareEngine] = []

    def make(kind: str, layout: str, io_backend: str, **extra: Any) -> BareEngine:
        config = suite_extra_config(shared_store, extra_backend_tag=request.node.name, **extra)
        engines.append(BareEngine(kind, layout, io_backend, config))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.mark.parametrize(
    "kind, layout, io_backend, extra",
    [
        ("full", "layer_first", "direct", {}),
        ("full", "layer_first", "kernel", {}),
        ("full", "page_first", "kernel", {}),
        ("full", "page_first_direct", "direct", {}),
        ("full", "page_head", "kernel", {}),
        ("full", "layer_first", "direct", {"interface_v1": 0}),
        ("full", "page_first", "kernel", {"interface_v1": 0}),
        ("full", "page_first", "kernel", {"planes": ["tcp"]}),
        ("full", "page_first", "kernel", {"allocator": "shm"}),
        ("swa", "page_first", "kernel", {}),
        ("swa", "layer_first", "direct", {"interface_v1": 0}),
        ("mamba", "page_first", "kernel", {}),
        ("mamba", "page_first", "kernel", {"allocator": "shm"}),
    ],
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else value,
)
def test_every_pools_bytes_arrive(
    new_engine: NewEngine, kind: str, layout: str, io_backend: str, extra: dict[str, Any]
) -> None:
    first = new_engine(kind, layout, io_backend, **extra)
    tokens = first.tokens(6)
    first.fill(seed=7)
    first.insert(tokens)
    saved = first.device_bytes(tokens)
    hashes = first.save(tokens)
    assert len(hashes) == 6
    first.close()

    second = new_engine(kind, layout, io_backend, **extra)
    second.fill(seed=None)
    assert second.prefetch(tokens) == len(tokens)
    assert second.load_back(tokens) == len(tokens)
    loaded = second.device_bytes(tokens)
    assert set(loaded) == {"kv", *({kind} - {"full"})}
    for name, tensors in loaded.items():
        for number, (before, after) in enumerate(zip(saved[name], tensors, strict=True)):
            tail = before[-len(after) :] if name == "swa" else before
            assert after.numel(), name
            assert torch.any(after), name
            assert torch.equal(tail, after), f"{name}, tensor {number}"
