"""A scheduler side over a store in memory, driven step by step."""

from typing import Any

from kvcore.client.fake import FakeStore, FakeStoreClient
from kvcore.keys import block_keys
from mooncake_connector.metadata import RankAnswer, SaveSpec, StepPlan
from mooncake_connector.scheduler_side import SchedulerSide
from tests.unit.mooncake_connector.rig import (
    BLOCK_TOKENS,
    DEADLINE_MS,
    Request,
    connector_config,
    scheduler_output,
)

NAMESPACES = [b"rank-0".ljust(16, b"."), b"rank-1".ljust(16, b".")]
PREFILL = {"mooncake_pd": {"role": "prefill", "transfer_id": "t1"}}
DECODE = {"mooncake_pd": {"role": "decode", "transfer_id": "t1", "wait_ms": 1234}}


def saved(request: Request, begin: int, end: int, block_ids: list[int], followed: bool = False) -> SaveSpec:
    """Blocks [begin, end) of the request, and the one they continue."""
    parent_hash = request.block_hashes[begin - 1] if begin else b""
    return SaveSpec(request.request_id, request.block_hashes[begin:end], block_ids, followed, parent_hash)


class Rig:
    def __init__(self, namespaces: list[bytes] = NAMESPACES[:1], **kwargs: Any) -> None:
        self.store = FakeStore()
        self.client = FakeStoreClient(self.store)
        self.namespaces = namespaces
        config = {"lookup_timeout_ms": DEADLINE_MS, "lookup_wait_ms": DEADLINE_MS, **kwargs.pop("config", {})}
        self.side = SchedulerSide(connector_config(**config), lambda: self.client, BLOCK_TOKENS, **kwargs)
        self.side.connect([RankAnswer(namespace) for namespace in namespaces])

    def put(self, request: Request, blocks: range, namespaces: list[bytes] | None = None) -> None:
        for namespace in self.namespaces if namespaces is None else namespaces:
            keys = block_keys(namespace, [request.block_hashes[block] for block in blocks])
            writer = FakeStoreClient(self.store)
            writer.reserve(keys, 8, 1)
            writer.write_layers(keys, 0, 1, [bytearray(8)] * len(keys)).wait()

    def alloc(self, request: Request, block_ids: list[int], num_external_tokens: int) -> None:
        self.side.update_after_alloc(request, block_ids, num_external_tokens)

    def prefill_step(
        self, request: Request, block_ids: list[int], computed: int, num_tokens: int
    ) -> StepPlan:
        return self.side.build_plan(
            scheduler_output(
                new=[(request.request_id, block_ids, computed)], scheduled={request.request_id: num_tokens}
            )
        )

    def next_step(
        self, request: Request, new_block_ids: list[int] | None, computed: int, num_tokens: int, **kwargs: Any
    ) -> StepPlan:
        return self.side.build_plan(
            scheduler_output(
                cached=[(request.request_id, new_block_ids, computed)],
                scheduled={request.request_id: num_tokens},
                **kwargs,
            )
        )
