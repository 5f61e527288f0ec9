"""The blocks that become full in one engine step, and how far each is on its way to the store.

Two threads share a StepSave. The engine's thread has layers copied into staging slots (`snapshot`); the save
thread learns which blocks it may write (`grant`) and takes layers away in order (`next_run`).
"""

import threading
from collections.abc import Sequence

from mooncake_connector.kv_memory import Done, KVMemory
from mooncake_connector.metadata import SaveSpec
from mooncake_connector.staging import Staging

Slots = dict[int, int]  # index of a block in the step -> its staging slot


class LayerRun:
    """Layers [begin, end) that can be committed now; slots[l - begin] are those of layer l."""

    def __init__(self, begin: int, slots: list[Slots], copied: list[Done]) -> None:
        self.begin = begin
        self.end = begin + len(slots)
        self.slots = slots
        self._copied = copied

    def wait_copied(self) -> None:
        """Returns when the slots hold their layers."""
        for done in self._copied:
            done.wait()


class StepSave:
    def __init__(
        self, specs: Sequence[SaveSpec], keys: Sequence[Sequence[bytes]], first_parents: Sequence[bytes]
    ) -> None:
        """keys[i] are the store's keys of specs[i].block_hashes, first_parents[i] that of the block before
        them (b"" for none). A block named twice is saved once."""
        self.keys: list[bytes] = []
        self.parents: list[bytes] = []
        self.block_ids: list[int] = []
        self.followed: list[bool] = []
        self.first_of_request: dict[int, str] = {}
        seen: set[bytes] = set()
        for spec, spec_keys, first_parent in zip(specs, keys, first_parents, strict=True):
            parents = [first_parent, *spec_keys[:-1]]
            for key, parent, block_id in zip(spec_keys, parents, spec.block_ids, strict=True):
                if key in seen:
                    continue
                if key == spec_keys[0]:
                    self.first_of_request[len(self.keys)] = spec.request_id
                seen.add(key)
                self.keys.append(key)
                self.parents.append(parent)
                self.block_ids.append(block_id)
                self.followed.append(spec.followed)
        self._lock = threading.Lock()
        self._live = list(range(len(self.keys)))
        self._taken: set[int] = set()
        self._waiting: dict[int, tuple[Slots, Done]] = {}
        self._next_layer = 0
        self.granted: list[int] | None = None
        self.abandoned = False
        self.finished = False

    @property
    def followed_indices(self) -> list[int]:
        return [index for index, followed in enumerate(self.followed) if followed]

    # ---- engine thread

    def snapshot(self, layer: int, memory: KVMemory, staging: Staging) -> int:
        """Copies one layer of all blocks still of interest; returns how many found no staging slot.

        A block that misses one layer is lost, and its later layers are not copied any more.
        """
        with self._lock:
            if layer in self._taken or self.abandoned:
                return 0
            self._taken.add(layer)
            live = self._live
        slots = dict(zip(live, staging.take(len(live)), strict=False))
        block_ids = [self.block_ids[index] for index in slots]
        try:
            copied = memory.copy_out(layer, block_ids, staging.rows, list(slots.values()))
        except BaseException:
            staging.give(list(slots.values()))
            raise
        with self._lock:
            self._waiting[layer] = slots, copied
            if len(slots) < len(live):
                # The leading blocks are kept: a prefix is of use only from its beginning.
                self._live = [index for index in self._live if index in slots]
        return len(live) - len(slots)

    def missing_layers(self, num_layers: int) -> list[int]:
        with self._lock:
            return [layer for layer in range(num_layers) if layer not in self._taken]

    def abandon(self) -> None:
        with self._lock:
            self.abandoned = True

    # ---- save thread

    def grant(self, indices: list[int]) -> None:
        """Only these blocks are ours to write; the engine's thread stops copying the others."""
        with self._lock:
            self.granted = indices
            wanted = set(indices)
            self._live = [index for index in self._live if index in wanted]

    def drop(self, indices: Sequence[int]) -> None:
        with self._lock:
            gone = set(indices)
            self.granted = [index for index in self.granted or [] if index not in gone]
            self._live = [index for index in self._live if index not in gone]

    def next_run(self) -> LayerRun | None:
        """The layers that have arrived without a gap since the last call."""
        with self._lock:
            begin = self._next_layer
            ready: list[tuple[Slots, Done]] = []
            while self._next_layer in self._waiting:
                ready.append(self._waiting.pop(self._next_layer))
                self._next_layer += 1
            return (
                LayerRun(begin, [slots for slots, _ in ready], [done for _, done in ready]) if ready else None
            )

    def leftover_slots(self) -> list[int]:
        """Takes away all slots that will not be written any more. A device may still be copying into some:
        whoever takes them next has his copies done after those, in the same queue."""
        with self._lock:
            slots = [slot for layer, _ in self._waiting.values() for slot in layer.values()]
            self._waiting.clear()
            return slots

    @property
    def complete_layers(self) -> int:
        return self._next_layer
