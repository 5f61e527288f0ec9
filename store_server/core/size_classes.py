"""Which chunk sizes there are, and of which pieces an object of a given size is made."""

from bisect import bisect_left

ALIGNMENT_BYTES = 64  # a cache line; no two objects share one
_STEPS_PER_DOUBLING = 8  # rounding up wastes at most an eighth
_MAX_TAIL_PIECES = 3
_MAX_CACHED_PLANS = 65536

Plan = tuple[int, tuple[int, ...], int]  # whole slabs, classes of the chunks for the rest, cost in bytes


class SizeClasses:
    """Chunk sizes from 64 bytes to half a slab, for slabs of `slab_bytes` (a power of two from 4 KiB).

    Small ones grow by eighths of a power of two, which holds 5/4, 3/2 and 7/4 of a power exactly: that is
    what KV blocks mostly are. Large ones divide the slab evenly, or its end would be wasted.
    """

    def __init__(self, slab_bytes: int) -> None:
        self.slab_bytes = slab_bytes
        sizes = {
            _align_down(slab_bytes // parts)
            for parts in range(2, 9)
            if slab_bytes // parts >= ALIGNMENT_BYTES
        }
        doubling = ALIGNMENT_BYTES
        while doubling < slab_bytes // 8:
            for step in range(_STEPS_PER_DOUBLING):
                size = _align_down(doubling + doubling * step // _STEPS_PER_DOUBLING)
                if size <= slab_bytes // 8:
                    sizes.add(size)
            doubling *= 2
        self.chunk_bytes = sorted(sizes)
        self.slots = [slab_bytes // size for size in self.chunk_bytes]
        self.cost_bytes = [slab_bytes // slots for slots in self.slots]
        self._plans: dict[int, Plan] = {}

    def plan(self, size_bytes: int) -> Plan:
        """Pieces of an object of `size_bytes`, at most three besides whole slabs, and what they take of the
        pool, each with its share of the unusable end of its slab."""
        plan = self._plans.get(size_bytes)
        if plan is None:
            if size_bytes <= 0:
                raise ValueError(f"an object has at least 1 byte, not {size_bytes}")
            num_whole, tail = self._make_pieces(size_bytes)
            cost = num_whole * self.slab_bytes + sum(self.cost_bytes[index] for index in tail)
            plan = num_whole, tail, cost
            if len(self._plans) < _MAX_CACHED_PLANS:
                self._plans[size_bytes] = plan
        return plan

    def _make_pieces(self, size_bytes: int) -> tuple[int, tuple[int, ...]]:
        num_whole, rest = divmod(size_bytes, self.slab_bytes)
        if rest == 0:
            return num_whole, ()
        tolerated_waste = max(size_bytes // _STEPS_PER_DOUBLING, ALIGNMENT_BYTES)
        largest = len(self.chunk_bytes) - 1
        tail: tuple[int, ...] = ()
        if rest > self.chunk_bytes[largest]:
            if self.slab_bytes - rest <= tolerated_waste:
                return num_whole + 1, ()
            tail = (largest,)
            rest -= self.chunk_bytes[largest]
        while True:
            above = bisect_left(self.chunk_bytes, rest)
            is_tight = self.chunk_bytes[above] == rest or self.cost_bytes[above] - rest <= tolerated_waste
            if is_tight or above == 0 or len(tail) == _MAX_TAIL_PIECES - 1:
                return num_whole, (*tail, above)
            tail = (*tail, above - 1)
            rest -= self.chunk_bytes[above - 1]


def _align_down(size_bytes: int) -> int:
    return size_bytes - size_bytes % ALIGNMENT_BYTES
