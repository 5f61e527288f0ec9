"""Which instance holds how much of a prompt, for those who ask: the index behind Conductor's interface.

Prefixes are named by the standard hash of Mooncake's KV Events API (XXH3-64 with seed 0): a block's own hash
is that of its tokens as little-endian u32; the first is also its prefix's, every later prefix hashes the one
before it and the block. What may not be mixed (model, LoRA, tenant, block size, salt) are separate indexes,
so callers can compute the hashes of a prompt knowing nothing but its tokens.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from kvcore.wire.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, Medium
from router.core.block_hash import TOKEN_BYTES, root_seed, xxh3
from router.core.prefix_index import PrefixIndex

# Each is an index with a memory cap of its own.
MAX_SCOPES = 256
_NAMES = {Medium.GPU: "GPU", Medium.CPU: "CPU", Medium.DISK: "DISK", Medium.EXTERNAL: "EXTERNAL"}
assert sys.byteorder == "little", "tokens are hashed as little-endian u32"


def standard_hash(block: bytes, parent: int) -> int:
    """`parent` 0: the first block of a prompt."""
    local = xxh3(block)
    if not parent:
        return local
    return xxh3(parent.to_bytes(8, "little") + local.to_bytes(8, "little"))


def standard_hashes(token_ids: Sequence[int], block_size_tokens: int, root: int = 0) -> list[int]:
    """One for each full block. OverflowError for a token id that is no u32."""
    data, block_bytes, found = array("I", token_ids).tobytes(), block_size_tokens * TOKEN_BYTES, []
    for start in range(0, len(data) - block_bytes + 1, block_bytes):
        root = standard_hash(data[start : start + block_bytes], root)
        found.append(root)
    return found


class Scope(NamedTuple):
    """What separates KV that must not be mixed."""

    model: str
    lora_name: str
    tenant_id: str
    block_size: int
    salt: str


class Publisher(msgspec.Struct, frozen=True):
    """One stream of events: that of one data parallel rank of an instance. `scope` is that of its base model;
    events that name a LoRA belong to the scope of that."""

    instance_id: str
    dp_rank: int
    scope: Scope

    @property
    def key(self) -> str:
        return f"{self.instance_id}|{self.scope.tenant_id}|{self.dp_rank}"


class Held(msgspec.Struct):
    """Leading tokens of one prompt that one instance holds, by medium and by rank."""

    longest_matched: int = 0
    by_medium: dict[str, int] = {}
    by_rank: dict[str, int] = {}


class ConductorIndex:
    """Not safe for several threads. `max_size_bytes`: of each scope's index."""

    def __init__(self, max_size_bytes: int) -> None:
        self._max_size_bytes = max_size_bytes
        self._indexes: dict[Scope, PrefixIndex] = {}
        self._workers: dict[Scope, dict[str, tuple[int, Publisher]]] = {}
        self.num_dropped_events = 0  # of scopes that were one too many

    @property
    def num_scopes(self) -> int:
        return len(self._indexes)

    def remove(self, publisher: Publisher) -> None:
        """Everything it said is forgotten."""
        for scope in list(self._workers):
            found = self._workers[scope].pop(publisher.key, None)
            if found is None:
                continue
            if self._workers[scope]:
                self._indexes[scope].remove_worker(found[0])
            else:
                del self._workers[scope], self._indexes[scope]

    def clear(self, publisher: Publisher) -> None:
        for scope, workers in self._workers.items():
            if publisher.key in workers:
                self._indexes[scope].clear_worker(workers[publisher.key][0])

    def apply(self, publisher: Publisher, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, BlockStored):
                scope = publisher.scope
                if event.lora_name:
                    scope = scope._replace(lora_name=event.lora_name)
                    event = msgspec.structs.replace(
                        event, lora_name="", extra_keys=_without(event.extra_keys, event.lora_name)
                    )
                worker = self._worker(scope, publisher)
                if worker < 0:
                    self.num_dropped_events += 1
                else:
                    self._indexes[scope].apply(worker, [event])
            elif isinstance(event, AllBlocksCleared):
                self.clear(publisher)
            elif isinstance(event, BlockRemoved):
                # It does not say of which LoRA; hashes of different ones differ.
                for scope, workers in self._workers.items():
                    if publisher.key in workers:
                        self._indexes[scope].apply(workers[publisher.key][0], [event])

    def query(self, scope: Scope, token_ids: Sequence[int], now: float) -> dict[str, Held]:
        """By instance. A salt nobody registered is that of requests (vLLM's cache_salt) in the scope without
        salt. OverflowError for a token id that is no u32."""
        root = 0
        if scope.salt and scope not in self._indexes:
            root = root_seed("", scope.salt)
            scope = scope._replace(salt="")
        return self.query_by_hash(scope, standard_hashes(token_ids, scope.block_size, root), now)

    def query_by_hash(self, scope: Scope, seq_hashes: Sequence[int], now: float) -> dict[str, Held]:
        index = self._indexes.get(scope)
        if index is None:
            return {}
        match = index.match(seq_hashes, now)
        found: dict[str, Held] = {}
        for worker, publisher in self._workers[scope].values():
            held = found.setdefault(publisher.instance_id, Held())
            longest = 0
            for medium, name in _NAMES.items():
                tokens = match.depth_on(worker, medium) * scope.block_size
                held.by_medium[name] = max(tokens, held.by_medium.get(name, 0))
                longest = max(longest, tokens)
            held.by_rank[str(publisher.dp_rank)] = longest
            held.longest_matched = max(held.longest_matched, longest)
        return found

    def sweep(self) -> None:
        """A slice of the tidying that cleared publishers leave behind."""
        for index in self._indexes.values():
            index.sweep()

    def _worker(self, scope: Scope, publisher: Publisher) -> int:
        """Its number in the scope's index; -1 when there are too many scopes."""
        workers = self._workers.get(scope)
        if workers is None:
            if len(self._indexes) >= MAX_SCOPES:
                return -1
            self._indexes[scope] = PrefixIndex(
                scope.block_size, self._max_size_bytes, hash_block=standard_hash
            )
            workers = self._workers[scope] = {}
        if publisher.key not in workers:
            workers[publisher.key] = (self._indexes[scope].add_worker(publisher.key), publisher)
        return workers[publisher.key][0]


def _without(extra_keys: Sequence[object] | None, lora_name: str) -> list[object] | None:
    """vLLM puts the LoRA's name first among the extra keys of each block."""
    if extra_keys is None:
        return None
    return [
        list(keys)[1:] or None if isinstance(keys, (list, tuple)) and keys and keys[0] == lora_name else keys
        for keys in extra_keys
    ]
