"""Who holds which prefix, learned from KV events (the paper's FindBestPrefixMatch and instance.prefix_len).

One index serves the workers of one model: engine instances (one per DP rank) and store nodes. Engine hashes
are only names by which removals find a block; lookups go by the router's own chain (core.block_hash).
Not safe for several threads.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Sequence
from itertools import accumulate
from operator import or_

from kvcore.wire.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, Medium
from router.core.block_hash import TOKEN_BYTES, root_seed, xxh3
from router.core.block_table import BlockTable, HashBlock
from router.core.index_stats import IndexStats
from router.core.placement import Placement, PredictedPlacements
from router.core.view import NO_WORKER, InstanceState

# Hybrid models publish one event per KV cache group. Only full attention has the prefix property.
_INDEXED_KINDS = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
_MEDIA = len(Medium)
_SLOTS = 1 + _MEDIA  # per worker: all its slots, then the slot of each medium
_PLACEMENTS_SHARE = 4  # predicted placements may take a quarter of the blocks' memory, on top of it
_PLACED_BLOCK_SIZE_BYTES = 40  # a reference and its number
# An adapter of a longer name is none that a request asks for.
MAX_LORA_NAMES, _MAX_LORA_NAME_CHARS = 10_000, 1024


class IndexMatch:
    """A PrefixMatch. `levels` are (depth in blocks, slots), deepest first; `predicted` are (depth, workers).

    Valid until the next change of the index.
    """

    def __init__(
        self,
        best_blocks: int,
        best_worker: int,
        best_medium: Medium,
        levels: Sequence[tuple[int, int]],
        predicted: Sequence[tuple[int, int]],
        slots: Sequence[int],
        has_slow_media: bool,
    ) -> None:
        self.best_blocks = best_blocks
        self.best_worker = best_worker
        self.best_medium = best_medium
        self.levels = levels
        # Slots of each level and of all deeper ones: a holder's level is found by bisection.
        self._reaching = list(accumulate((holders for _, holders in levels), or_))
        self.predicted = predicted
        self.slots = slots
        self.has_slow_media = has_slow_media

    def local_blocks_of(self, instances: Sequence[InstanceState]) -> Sequence[int]:
        found = []
        levels, predicted, all_slots = self.levels, self.predicted, self.slots
        reaching = self._reaching
        holding_any = reaching[-1] if levels else 0
        for instance in instances:
            blocks = 0
            worker = instance.worker
            if levels:
                slots = all_slots[worker * _SLOTS] if worker >= 0 else 0
                if instance.store_worker >= 0:
                    slots |= all_slots[instance.store_worker * _SLOTS]
                if holding_any & slots:
                    # As _depth_of has it; calling that is as long again.
                    low, high = 0, len(reaching) - 1
                    while low < high:
                        middle = (low + high) >> 1
                        if reaching[middle] & slots:
                            high = middle
                        else:
                            low = middle + 1
                    blocks = levels[low][0]
            if worker >= 0:
                for depth, workers in predicted:
                    if depth <= blocks:
                        break
                    if workers >> worker & 1:
                        blocks = depth
                        break
            found.append(blocks)
        return found

    def depth_on(self, worker: int, medium: Medium) -> int:
        """Leading blocks it has on this medium, by its events."""
        return self._depth_of(self.slots[worker * _SLOTS + 1 + medium])

    def blocks_by_medium(self, instance: InstanceState) -> tuple[int, int, int, int]:
        counts = [0] * _MEDIA
        reached = 0
        for medium in Medium:
            slots = self.slots[instance.worker * _SLOTS + 1 + medium] if instance.worker >= 0 else 0
            if instance.store_worker >= 0:
                slots |= self.slots[instance.store_worker * _SLOTS + 1 + medium]
            depth = self._depth_of(slots)
            counts[medium] = max(0, depth - reached)
            reached = max(reached, depth)
        # What is predicted will be on the GPU, where it is being computed.
        counts[Medium.GPU] += self.local_blocks_of((instance,))[0] - reached
        return counts[0], counts[1], counts[2], counts[3]

    def _depth_of(self, slots: int) -> int:
        """Leading blocks that one of these slots holds."""
        reaching = self._reaching
        low, high = 0, len(reaching)
        while low < high:
            middle = (low + high) >> 1
            if reaching[middle] & slots:
                high = middle
            else:
                low = middle + 1
        return self.levels[low][0] if low < len(reaching) else 0


class PrefixIndex:
    """`max_size_bytes` is a hard cap: beyond it the least recently used leaves are forgotten.

    `predicted_ttl_s`: how long a placement counts before its events have arrived (see core.placement).
    """

    def __init__(
        self,
        block_size_tokens: int,
        max_size_bytes: int = 512 << 20,
        predicted_ttl_s: float = 30.0,
        hash_block: HashBlock = xxh3,
    ) -> None:
        if block_size_tokens < 1:
            raise ValueError(f"block_size_tokens must be positive, not {block_size_tokens}")
        self.block_size_tokens = block_size_tokens
        self.stats = IndexStats()
        self.table = BlockTable(max_size_bytes, hash_block)
        self._block_bytes = block_size_tokens * TOKEN_BYTES
        max_placed_blocks = max_size_bytes // _PLACEMENTS_SHARE // _PLACED_BLOCK_SIZE_BYTES
        self._placements = PredictedPlacements(predicted_ttl_s, max_blocks=max_placed_blocks)
        self.worker_ids: dict[int, str] = {}
        self._free_workers: list[int] = []  # a heap
        # Seen in events, the last one last: models whose KV is not the base model's.
        self.lora_names: dict[str, None] = {}
        self._shared: list[bool] = []
        self._group: list[int | None] = []
        self._has_published: list[bool] = []
        self._slots: list[int] = []  # _SLOTS for each worker, as bitmasks; 0: none yet
        self._owner: list[int] = []  # by slot number
        self._of_medium = [0] * _MEDIA  # live slots
        self._free_slots: list[int] = []
        self._dead_slots: list[int] = []
        self._swept_slots: list[int] = []  # dead before the sweep under way began
        self._fetchable = 0
        self.table.alive = 0

    @property
    def size_bytes(self) -> int:
        """Upper bound of the memory the blocks take; never above the cap."""
        return self.table.size_bytes

    @property
    def num_slots(self) -> int:
        """Bits in use in the holders' masks, those still to be swept included."""
        return len(self._owner)

    # ---- workers --------------------------------------------------------------------------------------

    def add_worker(self, worker_id: str, shared: bool = False) -> int:
        """Its number, from now on. `shared`: others can fetch its blocks (store nodes; engines whose local
        tier is part of the pool, as in the paper)."""
        worker = heapq.heappop(self._free_workers) if self._free_workers else len(self._shared)
        if worker == len(self._shared):
            self._shared.append(shared)
            self._group.append(None)
            self._has_published.append(False)
            self._slots.extend([0] * _SLOTS)
        self._shared[worker] = shared
        self._has_published[worker] = False
        self.worker_ids[worker] = worker_id
        return worker

    def remove_worker(self, worker: int) -> None:
        """Its blocks are dropped and its number may be given to another."""
        self.clear_worker(worker)
        del self.worker_ids[worker]
        heapq.heappush(self._free_workers, worker)

    def clear_worker(self, worker: int) -> None:
        """It holds nothing (any more). Takes constant time: `sweep` tidies up later."""
        base = worker * _SLOTS
        for medium in Medium:
            slot_bit = self._slots[base + 1 + medium]
            if slot_bit:
                self._dead_slots.append(slot_bit.bit_length() - 1)
                self.table.alive &= ~slot_bit
                self.table.forget_strangers(slot_bit)
                self._of_medium[medium] &= ~slot_bit
                self._fetchable &= ~slot_bit
                self._slots[base + 1 + medium] = 0
        self._slots[base] = 0
        self._group[worker] = None
        self._placements.forget(worker)
        self.stats.workers_cleared += 1

    def sweep(self, max_blocks: int = 2000) -> bool:
        """A slice of the tidying that cleared workers leave behind; False when there is none to do.

        2,000 blocks take a fraction of a millisecond; call it whenever there is time.
        """
        if not self._swept_slots:
            if not self._dead_slots:
                return False
            self._swept_slots, self._dead_slots = self._dead_slots, []
            self.table.begin_sweep()
        if self.table.sweep(max_blocks):
            self._free_slots.extend(self._swept_slots)
            self._swept_slots = []
        return True

    # ---- events ---------------------------------------------------------------------------------------

    def apply(self, worker: int, events: Sequence[Event]) -> None:
        """In the order they were published. What cannot be used is counted in `stats`, never raised."""
        self._has_published[worker] = True
        for event in events:
            self.stats.events += 1
            if type(event) is BlockStored:
                self._stored(worker, event)
            elif type(event) is BlockRemoved:
                self._removed(worker, event)
            elif type(event) is AllBlocksCleared:
                self.clear_worker(worker)

    def _stored(self, worker: int, event: BlockStored) -> None:
        if not self._is_indexed(worker, event):
            self.stats.other_group_events += 1
            return
        slot_bit = self._slots[worker * _SLOTS + 1 + event.medium] or self._new_slot(worker, event.medium)
        hashes = event.block_hashes
        if not event.token_ids:
            self.stats.unknown_hash += self.table.add_holder(hashes, slot_bit)
            return
        if event.block_size != self.block_size_tokens:
            self.stats.other_block_size += len(hashes)
            return
        parent = None
        if event.parent_block_hash is not None:
            parent = self.table.by_engine_hash(event.parent_block_hash)
            if parent is None:
                # Its ancestors were published before we listened: without their tokens it has no own hash.
                self.stats.unknown_parent += len(hashes)
                return
        num_full = len(event.token_ids) // self.block_size_tokens
        if num_full < len(hashes):
            hashes = hashes[:num_full]
        seed, extra_keys = 0, None
        if event.lora_name:
            self._note_lora(event.lora_name)
        if event.lora_name or event.cache_salt or event.extra_keys:
            seed, extra_keys = _seed_and_extras(event)
        try:
            data = array("I", event.token_ids).tobytes()
        except OverflowError:
            self.stats.bad_events += 1  # a token id that is no u32
            return
        self.table.store_chain(hashes, parent, seed, data, self._block_bytes, extra_keys, slot_bit)
        self.stats.stored += len(hashes)

    def _note_lora(self, name: str) -> None:
        """Engines load and unload adapters for as long as they live: the oldest names make room."""
        names = self.lora_names
        names.pop(name, None)
        if len(name) <= _MAX_LORA_NAME_CHARS:
            names[name] = None
        if len(names) > MAX_LORA_NAMES:
            del names[next(iter(names))]

    def _removed(self, worker: int, event: BlockRemoved) -> None:
        group = self._group[worker]
        if event.group_idx is not None and group is not None and event.group_idx != group:
            self.stats.other_group_events += 1
            return
        slot_bit = self._slots[worker * _SLOTS + 1 + event.medium]
        if slot_bit:
            self.table.remove_holder(event.block_hashes, slot_bit)
            self.stats.removed += len(event.block_hashes)

    def _is_indexed(self, worker: int, event: BlockStored) -> bool:
        if event.kv_cache_spec_kind not in _INDEXED_KINDS:
            return False
        if event.group_idx is None:
            return True
        if self._group[worker] is None:
            self._group[worker] = event.group_idx
        return self._group[worker] == event.group_idx

    def _new_slot(self, worker: int, medium: Medium) -> int:
        if self._free_slots:
            slot = self._free_slots.pop()
            self._owner[slot] = worker
        else:
            slot = len(self._owner)
            self._owner.append(worker)
        slot_bit = 1 << slot
        base = worker * _SLOTS
        self._slots[base] |= slot_bit
        self._slots[base + 1 + medium] = slot_bit
        self.table.alive |= slot_bit
        self._of_medium[medium] |= slot_bit
        if self._shared[worker]:
            self._fetchable |= slot_bit
        return slot_bit

    # ---- lookups --------------------------------------------------------------------------------------

    def place(
        self, worker: int, block_hashes: Sequence[int], now: float, expected_at: float | None = None
    ) -> Placement:
        """A request with these blocks was sent to `worker`, its prefill expected to be done at `expected_at`:
        the worker will hold them before its events say so."""
        return self._placements.add(worker, block_hashes, now, now if expected_at is None else expected_at)

    def placed(self, placement: Placement, now: float, succeeded: bool) -> None:
        """Its prefill is over. A worker that publishes no events is believed until the placement expires."""
        if not succeeded:
            self._placements.withdraw(placement)
        elif self._has_published[placement.worker]:
            self._placements.settle(placement, now)

    def match(self, block_hashes: Sequence[int], now: float) -> IndexMatch:
        levels = self.table.levels(block_hashes)
        predicted = self._placements.levels(block_hashes, now)
        if levels:
            self.table.touch(block_hashes[levels[0][0] - 1])
        is_slow = self.table.alive != self._of_medium[Medium.GPU]
        for depth, holders in levels:
            fetchable = holders & self._fetchable
            if fetchable:
                worker, medium = self._fastest(fetchable)
                return IndexMatch(depth, worker, medium, levels, predicted, self._slots, is_slow)
        return IndexMatch(0, NO_WORKER, Medium.GPU, levels, predicted, self._slots, is_slow)

    def workers_holding(self, block_hash: int) -> list[str]:
        """Ids of those that hold the prefix ending in this block, or will once their prefill is done.

        Predicted holders are found only for prefixes whose length in blocks is a power of two.
        """
        holders = self.table.holders(block_hash)
        found = {self._owner[slot] for slot in range(holders.bit_length()) if holders >> slot & 1}
        found.update(self._placements.workers_at(block_hash))
        return sorted(self.worker_ids[worker] for worker in found)

    def slow_blocks(self, worker: int, block_hashes: Sequence[int]) -> list[int]:
        """Names (engine hashes) of those of these blocks that the worker holds, but not in memory."""
        base = worker * _SLOTS + 1
        fast = self._slots[base + Medium.GPU] | self._slots[base + Medium.CPU]
        slow = self._slots[base + Medium.DISK] | self._slots[base + Medium.EXTERNAL]
        return self.table.names_held(block_hashes, slow, fast)

    def held_blocks(self, worker: int, block_hashes: Sequence[int]) -> list[int]:
        """Names (engine hashes) of those of these blocks that the worker holds, on whatever medium."""
        return self.table.names_held(block_hashes, self._slots[worker * _SLOTS], 0)

    def holds(self, worker: int, engine_hash: int) -> bool:
        """Whether the worker has the block of that name, by its events."""
        block = self.table.by_engine_hash(engine_hash)
        return block is not None and bool(block.holders & self._slots[worker * _SLOTS])

    def _fastest(self, slots: int) -> tuple[int, Medium]:
        """(worker, medium) of one of `slots`, on the fastest medium among them."""
        for medium in Medium:
            of_medium = slots & self._of_medium[medium]
            if of_medium:
                return self._owner[of_medium.bit_length() - 1], medium
        raise AssertionError("a live slot has a medium")


def _seed_and_extras(event: BlockStored) -> tuple[int, list[object] | None]:
    """The root seed and what remains of the extra keys, in the form requests are hashed with.

    vLLM publishes per block, untagged: the LoRA name, (multimodal id, offset) pairs, the cache salt (first
    block of a prompt only), prompt embedding digests.
    """
    cache_salt = event.cache_salt
    extras: list[object] = []
    for keys in event.extra_keys or ():
        rest = list(keys) if keys else []
        if rest and rest[0] == event.lora_name:
            del rest[0]
        if not extras and event.parent_block_hash is None and rest and isinstance(rest[-1], str):
            cache_salt = rest.pop()
        extras.append(rest or None)
    extras.extend([None] * (len(event.block_hashes) - len(extras)))
    return root_seed(event.lora_name, cache_salt), extras if any(extras) else None
