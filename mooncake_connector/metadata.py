"""What the scheduler side tells the worker side about one engine step: pure data, pickled by vLLM.

Blocks are named by vLLM's block hashes; each rank puts its own namespace in front of them.
"""

import enum

import msgspec


class LoadMode(enum.IntEnum):
    SYNC = 0  # inside this step's forward pass, layer by layer
    ASYNC = 1  # between steps; the request waits in WAITING_FOR_REMOTE_KVS
    FOLLOW = 2  # ASYNC, following a prefill engine that may not have begun yet


class LoadSpec(msgspec.Struct, frozen=True, array_like=True):
    """Load block_hashes[i] into vLLM block block_ids[i]. `timeout_ms` bounds the whole load; `variant`: see
    variants.py."""

    request_id: str
    block_hashes: list[bytes]
    block_ids: list[int]
    mode: LoadMode
    timeout_ms: float
    variant: bytes = b""


class SaveSpec(msgspec.Struct, frozen=True, array_like=True):
    """Blocks of one request that are full at the end of this step.

    `followed`: a decode engine waits for them, so it must be told when they will not come. `parent_hash`: of
    the block before the first of them, b"" when that is the request's first block.
    """

    request_id: str
    block_hashes: list[bytes]
    block_ids: list[int]
    followed: bool = False
    parent_hash: bytes = b""
    variant: bytes = b""


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """One engine step. `runs_model` is False for steps that only move the connector along; `asks_ranks`: the
    scheduler side has not heard yet what the ranks call their blocks; `distrusts_loads`: what loads that have
    not ended bring is of no use any more."""

    loads: list[LoadSpec] = []
    saves: list[SaveSpec] = []
    runs_model: bool = True
    asks_ranks: bool = False
    distrusts_loads: bool = False


class RankAnswer(msgspec.Struct, frozen=True, array_like=True):
    """What each rank tells the scheduler side when its KV cache exists.

    `namespace` is empty when this rank cannot share its KV cache; `reason` then says why.
    """

    namespace: bytes = b""
    reason: str = ""
