"""A tiny engine without vLLM: KV memory in numpy, requests and scheduler outputs as plain objects."""

import hashlib
import logging
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvcore.client.fake import FakeStore, FakeStoreClient
from kvcore.guard import Guard
from kvcore.keys import NAMESPACE_BYTES, block_key
from mooncake_connector.config import ConnectorConfig
from mooncake_connector.counters import Counters
from mooncake_connector.device import Lane
from mooncake_connector.host_memory import HostMemory
from mooncake_connector.kv_memory import KVMemory
from mooncake_connector.metadata import LoadMode, LoadSpec, SaveSpec, StepPlan
from mooncake_connector.namespace import EngineFacts
from mooncake_connector.worker_side import WorkerSide
from tests.unit.mooncake_connector.fake_device import FakeDevice, staged_memory

BLOCK_TOKENS = 4
NUM_LAYERS = 3
NUM_BLOCKS = 16
LAYER_BYTES = 2 * BLOCK_TOKENS * 8
DEADLINE_MS = 20_000


def make_guard(counters: Counters) -> Guard:
    return Guard(logging.getLogger("test"), counters.add)


def make_layers(num_layers: int = NUM_LAYERS, num_blocks: int = NUM_BLOCKS, fill: int = 0) -> dict[str, Any]:
    return {
        f"model.layers.{layer}.attn": np.full((num_blocks, 2, BLOCK_TOKENS, 8), fill, dtype=np.uint8)
        for layer in range(num_layers)
    }


def block_hashes(tokens: Sequence[int]) -> list[bytes]:
    """Chained hashes of the full blocks, as vLLM's sha256 gives them."""
    hashes, parent = [], b""
    for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
        parent = hashlib.sha256(parent + repr(tokens[end - BLOCK_TOKENS : end]).encode()).digest()
        hashes.append(parent)
    return hashes


def name_of(block_hash: bytes) -> bytes:
    """What the store's keys of a block have in common in all namespaces."""
    return block_key(bytes(NAMESPACE_BYTES), block_hash)[NAMESPACE_BYTES:]


def kv_bytes(block_hash: bytes, layer: int) -> Any:
    """The KV a model would compute for that block: a function of its tokens and of all before them."""
    seed = int.from_bytes(hashlib.sha256(block_hash + bytes([layer])).digest()[:4], "big")
    values = np.random.default_rng(seed).integers(1, 255, LAYER_BYTES, dtype=np.uint8)
    return values.reshape(2, BLOCK_TOKENS, 8)


def engine_facts(**changes: Any) -> EngineFacts:
    facts: dict[str, Any] = {
        "architecture": "TestForCausalLM",
        "model_path": "/nowhere",
        "engine": "test",
        "layout": "plain",
        "kv_dtype": "uint8",
        "hash_scheme": "sha256 seed=0",
        "block_size_tokens": BLOCK_TOKENS,
    }
    return EngineFacts(**{**facts, **changes})


def connector_config(**changes: Any) -> ConnectorConfig:
    return ConnectorConfig(
        **{"weights_id": "w1", "load_timeout_ms": DEADLINE_MS, "staging_size_bytes": 1 << 20, **changes}
    )


class Engine:
    """One rank: WorkerSide over its own KV memory, and steps that compute and check KV."""

    ring_blocks = 0  # more: the KV memory lies on a (fake) device; so many blocks fit each ring of loads

    def __init__(
        self,
        store: FakeStore,
        *,
        layer_hooks: bool = True,
        facts: EngineFacts | None = None,
        favourite: Sequence[Lane] = (),
        seed: int | None = None,
        **config: Any,
    ) -> None:
        """`favourite` and `seed`: in which order a fake device works (FakeDevice)."""
        self.client = FakeStoreClient(store, timeout_ms=DEADLINE_MS)
        self.layers = make_layers(fill=255)
        self.worker = WorkerSide(connector_config(**config), lambda: self.client, layer_hooks=layer_hooks)
        self.device: FakeDevice | None = None
        self.worker.register(lambda: self._memory(favourite, seed), lambda: facts or engine_facts())

    def _memory(self, favourite: Sequence[Lane], seed: int | None) -> KVMemory:
        if not self.ring_blocks:
            return HostMemory(self.layers, NUM_BLOCKS)
        size_bytes = 2 * self.ring_blocks * NUM_LAYERS * LAYER_BYTES
        memory, self.device = staged_memory(self.layers, NUM_BLOCKS, size_bytes, favourite, seed)
        return memory

    def queue(self, work: Callable[[], None]) -> None:
        """Something the model does: at once, or when its device gets to it."""
        if self.device is None:
            work()
        else:
            self.device.queue(Lane.COMPUTE, work)

    def finish_device(self) -> None:
        if self.device is not None:
            self.device.finish()

    def compute(self, layer: int, block_id: int, block_hash: bytes) -> None:
        def work() -> None:
            self.layers[f"model.layers.{layer}.attn"][block_id] = kv_bytes(block_hash, layer)

        self.queue(work)

    def overwrite(self, block_ids: Sequence[int], value: int) -> None:
        def work() -> None:
            for array in self.layers.values():
                array[list(block_ids)] = value

        self.queue(work)

    def holds(self, block_id: int, block_hash: bytes) -> bool:
        self.finish_device()
        return all(
            np.array_equal(self.layers[f"model.layers.{layer}.attn"][block_id], kv_bytes(block_hash, layer))
            for layer in range(NUM_LAYERS)
        )

    def is_zero(self, block_id: int) -> bool:
        self.finish_device()
        return not any(array[block_id].any() for array in self.layers.values())

    def step(
        self,
        loads: Sequence[LoadSpec] = (),
        saves: Sequence[SaveSpec] = (),
        *,
        finished: set[str] | None = None,
        before_layer: Callable[[int], None] = lambda layer: None,
        hooks: bool = True,
    ) -> tuple[set[str], set[int]]:
        """One step as vLLM runs it: computes the blocks of `saves` layer by layer between the hooks."""
        worker = self.worker
        worker.begin_step(StepPlan(list(loads), list(saves), runs_model=bool(saves)))
        sync = any(load.mode is LoadMode.SYNC for load in loads)
        if sync:
            worker.start_loads()
        for layer in range(NUM_LAYERS):
            before_layer(layer)
            if hooks:
                worker.wait_layer(f"model.layers.{layer}.attn")
            for save in saves:
                for block_hash, block_id in zip(save.block_hashes, save.block_ids, strict=True):
                    self.compute(layer, block_id, block_hash)
            if hooks:
                worker.save_layer(f"model.layers.{layer}.attn")
        if not sync:
            worker.start_loads()
        worker.end_step()
        return worker.take_finished(finished or set()), worker.take_failed_blocks()

    def save(self, hashes: Sequence[bytes], block_ids: Sequence[int], request_id: str = "r") -> None:
        self.step(saves=[SaveSpec(request_id, list(hashes), list(block_ids))])
        assert self.worker.drain(DEADLINE_MS)

    def load(self, spec: LoadSpec) -> set[int]:
        """Starts one load and runs empty steps until it is reported; returns the blocks lost."""
        finished, lost = self.step(loads=[spec])
        if spec.mode is not LoadMode.SYNC and not finished:
            lost |= self.until_finished(spec.request_id)
        return lost

    def until_finished(self, request_id: str) -> set[int]:
        """Empty steps until the request's load is reported; returns the blocks lost meanwhile."""
        lost: set[int] = set()
        for _ in range(DEADLINE_MS // 2):
            finished, failed = self.step()
            lost |= failed
            if request_id in finished:
                return lost
        raise AssertionError(f"the load of {request_id} was never reported")

    def close(self) -> None:
        self.worker.shutdown()


class Request:
    """What the scheduler side sees of vLLM's Request."""

    def __init__(self, request_id: str, tokens: Sequence[int], params: dict[str, Any] | None = None) -> None:
        self.request_id = request_id
        self.tokens = list(tokens)
        self.num_prompt_tokens = len(self.tokens)
        self.num_preemptions = 0
        self.kv_transfer_params = params
        self.lora_request: Any = None
        self.mm_features: list[Any] = []
        self.skip_reading_prefix_cache = False

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def block_hashes(self) -> list[bytes]:
        return block_hashes(self.tokens)


def scheduler_output(
    new: Sequence[tuple[str, list[int], int]] = (),
    cached: Sequence[tuple[str, list[int] | None, int]] = (),
    scheduled: dict[str, int] | None = None,
    resumed: set[str] | None = None,
    drafts: dict[str, list[int]] | None = None,
) -> Any:
    """`new` and `cached`: (request id, block ids, tokens computed before the step)."""
    scheduled = scheduled or {}
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=request_id, block_ids=(block_ids,), num_computed_tokens=computed)
            for request_id, block_ids, computed in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[request_id for request_id, _, _ in cached],
            new_block_ids=[None if block_ids is None else (block_ids,) for _, block_ids, _ in cached],
            num_computed_tokens=[computed for _, _, computed in cached],
            resumed_req_ids=resumed or set(),
        ),
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        scheduled_spec_decode_tokens=drafts or {},
    )


def host_memory(layers: dict[str, Any]) -> HostMemory:
    return HostMemory(layers, next(iter(layers.values())).shape[0])
