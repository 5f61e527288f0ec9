"""Space of the pool: slabs cut into chunks of one size class, which wander between classes as they empty.

The pool is a row of slabs. A slab belongs to one size class while it holds live chunks and goes back to the
common pool with its last one, so a change of object sizes never strands memory for good. An object takes
whole slabs for its bulk and chunks for its rest; where a single chunk would waste over an eighth, the rest is
split over two or three. Everything is O(1) in the number of objects.

The allocator remembers each chunk's owner, so that eviction can clear one slab instead of the whole pool when
a class has to grow.
"""

from bisect import insort
from typing import Any

from store_server.core.size_classes import SizeClasses

Extents = tuple[int, ...]  # offset, size, offset, size, ...: the object's bytes, concatenated

_MIN_SLAB_BYTES = 4096
_WHOLE = -1  # class of a slab that belongs to one large object
WHOLE_SLAB = -1  # `missing` answers it when no slab is free


class _Slab:
    __slots__ = ("class_index", "freed", "live", "owners")

    def __init__(self, class_index: int) -> None:
        self.class_index = class_index
        self.owners: list[Any] = []  # by slot; its length is the number of slots ever used
        self.freed: list[int] = []
        self.live = 0


class SlabAllocator:
    """Offsets only, no bytes. Every offset and chunk is a multiple of 64."""

    def __init__(self, pool_size_bytes: int, slab_bytes: int | None = None) -> None:
        """`slab_bytes` (a power of two) defaults to a sixty-fourth of the pool, 64 KiB to 16 MiB. A pool that
        is no multiple of it loses the rest: see `size_bytes`."""
        if slab_bytes is None:
            sixty_fourth = max(pool_size_bytes // 64, 1)
            slab_bytes = min(max(1 << (sixty_fourth.bit_length() - 1), 64 << 10), 16 << 20)
        if slab_bytes < _MIN_SLAB_BYTES or slab_bytes & (slab_bytes - 1):
            raise ValueError(f"slab_bytes must be a power of two from {_MIN_SLAB_BYTES}, not {slab_bytes}")
        self.num_slabs = pool_size_bytes // slab_bytes
        if self.num_slabs == 0:
            raise ValueError(f"a pool of {pool_size_bytes} bytes holds no slab of {slab_bytes}")
        self.slab_bytes = slab_bytes
        self.size_bytes = self.num_slabs * slab_bytes
        self.classes = SizeClasses(slab_bytes)
        self.used_bytes = 0
        """What live objects keep others from using, a share of each slab's unusable end included: a pool that
        can take no more has used_bytes close to size_bytes."""
        self.requested_bytes = 0
        self._slabs: list[_Slab | None] = [None] * self.num_slabs
        self._free_slabs = list(range(self.num_slabs))
        num_classes = len(self.classes.chunk_bytes)
        self._current: list[int | None] = [None] * num_classes
        self._partial: list[dict[int, None]] = [{} for _ in range(num_classes)]

    def allocate(self, size_bytes: int, owner: Any) -> Extents | None:
        """Extents of exactly `size_bytes`, or None (and nothing taken) when there is no room; ask `missing`
        what is lacking."""
        num_whole, tail_classes, cost_bytes = self.classes.plan(size_bytes)
        extents: Extents | None
        if num_whole == 0 and len(tail_classes) == 1:
            offset = self._take_chunk(tail_classes[0], owner)
            extents = None if offset is None else (offset, size_bytes)
        else:
            extents = self._allocate_pieces(size_bytes, num_whole, tail_classes, owner)
        if extents is not None:
            self.used_bytes += cost_bytes
            self.requested_bytes += size_bytes
        return extents

    def free(self, extents: Extents) -> None:
        """Gives back what one `allocate` returned."""
        for index in range(0, len(extents), 2):
            offset, size = extents[index], extents[index + 1]
            first = offset // self.slab_bytes
            slab = self._slabs[first]
            if slab is None:
                raise ValueError(f"extent at {offset} is not allocated")
            self.requested_bytes -= size
            if slab.class_index == _WHOLE:
                num_slabs = -(-size // self.slab_bytes)
                for number in range(first, first + num_slabs):
                    self._release_slab(number)
                self.used_bytes -= num_slabs * self.slab_bytes
            else:
                self._free_chunk(first, slab, offset)

    def missing(self, size_bytes: int) -> int | None:
        """What keeps an object of this size out: a class index, WHOLE_SLAB, or None when it fits."""
        num_whole, tail_classes, _ = self.classes.plan(size_bytes)
        free_slabs = len(self._free_slabs) - num_whole
        if free_slabs < 0:
            return WHOLE_SLAB
        wanted: dict[int, int] = {}
        for class_index in tail_classes:
            wanted[class_index] = wanted.get(class_index, 0) + 1
        for class_index, count in wanted.items():
            lacking = count - self._num_free_chunks(class_index, count)
            if lacking > 0:
                free_slabs -= -(-lacking // self.classes.slots[class_index])
                if free_slabs < 0:
                    return class_index
        return None

    def fits_empty_pool(self, size_bytes: int) -> bool:
        num_whole, tail_classes, _ = self.classes.plan(size_bytes)
        return num_whole + len(set(tail_classes)) <= self.num_slabs

    def cost_bytes(self, size_bytes: int) -> int:
        """What an object of this size adds to `used_bytes`."""
        return self.classes.plan(size_bytes)[2]

    def holds(self, extents: Extents, class_index: int) -> bool:
        """Whether freeing these extents helps who is missing `class_index` (or WHOLE_SLAB)."""
        for offset in extents[::2]:
            slab = self._slabs[offset // self.slab_bytes]
            if slab is not None and slab.class_index in (class_index, _WHOLE):
                return True
        return False

    def neighbours(self, extents: Extents) -> list[Any]:
        """Owners of all live chunks in the slab where these extents begin: free them all to free the slab."""
        slab = self._slabs[extents[0] // self.slab_bytes]
        if slab is None:
            raise ValueError(f"extent at {extents[0]} is not allocated")
        return [owner for owner in slab.owners if owner is not None]

    @property
    def num_free_slabs(self) -> int:
        return len(self._free_slabs)

    def stranded_bytes(self) -> int:
        """Free chunks in slabs that belong to a class: of use to objects of that class only."""
        total = 0
        for slab in self._slabs:
            if slab is not None and slab.class_index != _WHOLE:
                free_slots = self.classes.slots[slab.class_index] - slab.live
                total += free_slots * self.classes.cost_bytes[slab.class_index]
        return total

    def _allocate_pieces(
        self, size_bytes: int, num_whole: int, tail_classes: tuple[int, ...], owner: Any
    ) -> Extents | None:
        if self.missing(size_bytes) is not None:
            return None
        extents: list[int] = []
        if num_whole:
            # The list is in order, so its end is where runs of neighbouring slabs are likely.
            taken = self._free_slabs[-num_whole:]
            del self._free_slabs[-num_whole:]
            for number in taken:
                slab = self._slabs[number] = _Slab(_WHOLE)
                slab.owners.append(owner)
                slab.live = 1
                offset = number * self.slab_bytes
                if extents and extents[-2] + extents[-1] == offset:
                    extents[-1] += self.slab_bytes
                else:
                    extents += (offset, self.slab_bytes)
        rest = size_bytes - num_whole * self.slab_bytes
        if rest < 0:
            extents[-1] += rest
        for class_index in tail_classes:
            chunk = self._take_chunk(class_index, owner)
            if chunk is None:
                raise AssertionError("`missing` promised room for every piece")
            piece_bytes = min(rest, self.classes.chunk_bytes[class_index])
            extents += (chunk, piece_bytes)
            rest -= piece_bytes
        return tuple(extents)

    def _take_chunk(self, class_index: int, owner: Any) -> int | None:
        number = self._current[class_index]
        if number is None:
            partial = self._partial[class_index]
            if partial:
                number, _ = partial.popitem()
            elif self._free_slabs:
                number = self._free_slabs.pop()
                self._slabs[number] = _Slab(class_index)
            else:
                return None
            self._current[class_index] = number
        slab = self._slabs[number]
        assert slab is not None
        slab.live += 1
        if slab.freed:
            slot = slab.freed.pop()
            slab.owners[slot] = owner
        else:
            # Unused slots go out in ascending order: objects of one batch lie side by side.
            slot = len(slab.owners)
            slab.owners.append(owner)
        if slab.live == self.classes.slots[class_index]:
            self._current[class_index] = None
        return number * self.slab_bytes + slot * self.classes.chunk_bytes[class_index]

    def _free_chunk(self, number: int, slab: _Slab, offset: int) -> None:
        class_index = slab.class_index
        slot, remainder = divmod(offset - number * self.slab_bytes, self.classes.chunk_bytes[class_index])
        if remainder or slot >= len(slab.owners) or slab.owners[slot] is None:
            raise ValueError(f"extent at {offset} is not allocated")
        slab.owners[slot] = None
        slab.freed.append(slot)
        slab.live -= 1
        self.used_bytes -= self.classes.cost_bytes[class_index]
        is_current = self._current[class_index] == number
        if slab.live == 0:
            if is_current:
                self._current[class_index] = None
            else:
                self._partial[class_index].pop(number, None)
            self._release_slab(number)
        elif not is_current:
            self._partial[class_index][number] = None

    def _release_slab(self, number: int) -> None:
        if self._slabs[number] is None:
            raise ValueError(f"slab {number} is not allocated")
        self._slabs[number] = None
        insort(self._free_slabs, number)

    def _num_free_chunks(self, class_index: int, enough: int) -> int:
        """Free chunks in slabs of this class, counted no further than `enough`."""
        slots = self.classes.slots[class_index]
        current = self._current[class_index]
        count = 0
        if current is not None:
            slab = self._slabs[current]
            assert slab is not None
            count = slots - slab.live
        for number in self._partial[class_index]:
            if count >= enough:
                break
            slab = self._slabs[number]
            assert slab is not None
            count += slots - slab.live
        return count
