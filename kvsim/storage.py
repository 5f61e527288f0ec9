"""Where KV is kept between prompts, and the events by which the router's prefix index learns of it."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from kvcore.wire.events import BlockRemoved, BlockStored, Event, Medium
from kvsim.block_cache import BlockCache, Changes
from kvsim.job import Job, token_bytes
from router.core.block_hash import TOKEN_BYTES
from router.core.prefix_index import PrefixIndex


class Storage(Protocol):
    """`node` numbers prefill groups."""

    @property
    def is_remote(self) -> bool:
        """What a node uses has to come over the network, from wherever it is."""
        ...

    def leading(self, node: int, job: Job) -> tuple[int, int]:
        """(leading blocks `node` can use, how many of them lie on SSD)."""
        ...

    def keep(self, node: int, job: Job, num_blocks: int) -> int:
        """`node` has computed or fetched the leading blocks of a prompt. Returns how many are new."""
        ...

    def replicas(self, keys: Sequence[bytes]) -> list[int]:
        """On how many nodes each block is."""
        ...


class NoStorage:
    is_remote = False

    def leading(self, node: int, job: Job) -> tuple[int, int]:
        return 0, 0

    def keep(self, node: int, job: Job, num_blocks: int) -> int:
        return 0

    def replicas(self, keys: Sequence[bytes]) -> list[int]:
        return [0] * len(keys)


class _Published:
    """One cache whose changes the index hears of."""

    def __init__(self, cache: BlockCache, index: PrefixIndex, worker: int) -> None:
        self.cache = cache
        self._index = index
        self._worker = worker

    def keep(self, job: Job, num_blocks: int) -> Changes:
        changes = self.cache.keep(job.keys[:num_blocks])
        events: list[Event] = []
        if changes.from_dram:
            events.append(BlockRemoved(_hashes(changes.from_dram), Medium.CPU))
        if changes.from_ssd:
            events.append(BlockRemoved(_hashes(changes.from_ssd), Medium.DISK))
        if changes.to_ssd:
            events.append(BlockStored(_hashes(changes.to_ssd), None, (), 0, Medium.DISK))
        # A block the index has never seen, or forgot when nobody held it, needs its tokens; it has no
        # children there, so that the rest of the prompt is unknown as well.
        stored = _hashes(changes.to_dram)
        known = self._index.table.by_engine_hash
        num_known = next((i for i, block_hash in enumerate(stored) if known(block_hash) is None), len(stored))
        if num_known:
            events.append(BlockStored(stored[:num_known], None, (), 0, Medium.CPU))
        if num_known < len(stored):
            events.append(self._with_tokens(job, stored[num_known:]))
        if events:
            self._index.apply(self._worker, events)
        return changes

    def _with_tokens(self, job: Job, hashes: Sequence[int]) -> BlockStored:
        first = job.hashes.index(hashes[0])
        block_size = self._index.block_size_tokens
        ids = job.request.hash_ids[first : first + len(hashes)]
        tokens = array("I")
        tokens.frombytes(token_bytes(ids, block_size))
        parent = job.hashes[first - 1] if first else None
        assert len(tokens) * TOKEN_BYTES == len(ids) * block_size * TOKEN_BYTES
        return BlockStored(hashes, parent, tokens, block_size, Medium.CPU)


class NodeStorage:
    """Each node has its own cache; a block may be in several of them."""

    is_remote = False

    def __init__(
        self, new_cache: Callable[[], BlockCache], index: PrefixIndex, workers: Sequence[int]
    ) -> None:
        self._nodes = [_Published(new_cache(), index, worker) for worker in workers]
        self._copies: Counter[bytes] = Counter()

    def leading(self, node: int, job: Job) -> tuple[int, int]:
        return self._nodes[node].cache.leading(job.keys)

    def keep(self, node: int, job: Job, num_blocks: int) -> int:
        changes = self._nodes[node].keep(job, num_blocks)
        copies = self._copies
        copies.update(changes.to_dram)
        for key in changes.from_dram:
            copies[key] -= 1
            if not copies[key]:
                del copies[key]
        return len(changes.to_dram)

    def replicas(self, keys: Sequence[bytes]) -> list[int]:
        return [self._copies[key] for key in keys]


class GlobalStorage:
    """One cache with the memory of all nodes; its blocks are spread over them."""

    is_remote = True

    def __init__(self, cache: BlockCache, index: PrefixIndex, worker: int) -> None:
        self._store = _Published(cache, index, worker)

    def leading(self, node: int, job: Job) -> tuple[int, int]:
        return self._store.cache.leading(job.keys)

    def keep(self, node: int, job: Job, num_blocks: int) -> int:
        return len(self._store.keep(job, num_blocks).to_dram)

    def replicas(self, keys: Sequence[bytes]) -> list[int]:
        return [int(key in self._store.cache.dram) for key in keys]


def _hashes(keys: Sequence[bytes]) -> list[int]:
    return [int.from_bytes(key, "big") for key in keys]
