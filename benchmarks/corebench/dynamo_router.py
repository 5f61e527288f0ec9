"""Dynamo's router core in a process of its own: ai-dynamo-runtime without etcd and NATS.

Runs in the peer's environment, which has nothing of ours but this folder.
"""

import importlib
import json
import struct
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from corebench.serving import Operation, cpu_us, serve

_core: Any = importlib.import_module("dynamo._core")
_xxhash: Any = importlib.import_module("xxhash")
_MODEL = "m"
_BLOCK_TOKENS = 16  # as in inputs.py
_SEQUENCE_SEED = 1337


class Dynamo:
    def __init__(self) -> None:
        self._service = _core.SelectionService()
        self._num_workers = 0
        self._operations: dict[str, Operation] = {}
        self._inputs: dict[str, Any] = {}
        self._num_booked = 0

    async def follow(self, worker: int, endpoint: str) -> None:
        await self._service.upsert_worker(
            {
                "worker_id": worker,
                "model_name": _MODEL,
                "endpoint": f"http://10.0.0.{worker}:8000",
                "block_size": _BLOCK_TOKENS,
                "max_num_batched_tokens": 8192,
                "total_kv_blocks": (1 << 20) // _BLOCK_TOKENS,
                "data_parallel_start_rank": 0,
                "data_parallel_size": 1,
                "kv_events_endpoints": {0: endpoint},
            }
        )

    async def depths(self, token_ids: list[int]) -> dict[int, int]:
        """Leading blocks that each worker holds, by its events."""
        scores = await self._service.overlap_scores({"model_name": _MODEL, "token_ids": token_ids})
        return {worker["worker_id"]: worker["device_blocks"] for worker in scores["workers"]}

    def prepare(self, path: str) -> list[str]:
        """From here on the inputs of that file are measured with; the names of what can be."""
        given = self._inputs = json.loads(Path(path).read_text())
        token_ids, names = given["token_ids"], given["names"]
        hashes = _core.compute_block_hash_for_seq(token_ids, _BLOCK_TOKENS)
        self._operations["hash"] = lambda: _core.compute_block_hash_for_seq(token_ids, _BLOCK_TOKENS)
        for what, depths in given["depths"].items():
            tree = _core.RadixTree()
            for worker, depth in enumerate(depths):
                blocks = [
                    {"block_hash": name, "tokens_hash": block}
                    for name, block in zip(names[:depth], hashes, strict=False)
                ]
                stored = {"stored": {"parent_hash": None, "blocks": blocks}}
                tree.apply_event(worker, json.dumps({"event_id": 0, "data": stored, "dp_rank": 0}).encode())
            assert len(tree.find_matches(hashes).scores) == len(depths)
            self._operations[f"lookup, {what}"] = _lookup(tree, hashes)
        self._operations["lookup, miss"] = _lookup(tree, [block ^ 1 for block in hashes])
        with_tokens = {"model_name": _MODEL, "token_ids": token_ids}
        with_hashes = {
            "model_name": _MODEL,
            "isl_tokens": len(token_ids),
            "block_hashes": _signed(hashes),
            "sequence_hashes": _signed(_sequence_hashes(hashes)),
        }
        self._operations["choose, token ids"] = lambda: self._service.select(with_tokens)
        self._operations["choose, hashes"] = lambda: self._service.select(with_hashes)
        self._operations["choose and book"] = self._choose_and_book
        return list(self._operations)

    async def load(self) -> None:
        """Puts requests on every worker, half of them decoding."""
        workers = [worker["worker_id"] for worker in self._service.list_workers(model_name=_MODEL)]
        for number, prompt in enumerate(self._inputs["under_way"]):
            worker, name = workers[number % len(workers)], f"loaded{number}"
            request = {"model_name": _MODEL, "selection_id": name, "worker_id": worker, "token_ids": prompt}
            await self._service.create_reservation(request)
            if number // len(workers) % 2:
                await self._service.prefill_complete(name)

    async def measure(self, what: str, min_s: float) -> float:
        return await cpu_us(self._operations[what], min_s)

    async def close(self) -> None:
        await self._service.shutdown_async()

    def _choose_and_book(self) -> Awaitable[None]:
        self._num_booked += 1
        return self._book(f"r{self._num_booked}")

    async def _book(self, name: str) -> None:
        request = {"model_name": _MODEL, "selection_id": name, "token_ids": self._inputs["token_ids"]}
        await self._service.select_and_reserve(request)
        await self._service.prefill_complete(name)
        await self._service.free_reservation(name)


def _lookup(tree: Any, hashes: list[int]) -> Operation:
    """How much of the prompt each worker holds."""
    return lambda: tree.find_matches(hashes).scores


def _sequence_hashes(hashes: list[int]) -> list[int]:
    """What callers with hashes of their own give beside those of blocks: of each prefix."""
    found = hashes[:1]
    for block in hashes[1:]:
        found.append(_xxhash.xxh3_64_intdigest(struct.pack("<QQ", found[-1], block), _SEQUENCE_SEED))
    return found


def _signed(hashes: list[int]) -> list[int]:
    return [block - (1 << 64) if block >> 63 else block for block in hashes]


if __name__ == "__main__":
    serve(Dynamo)
