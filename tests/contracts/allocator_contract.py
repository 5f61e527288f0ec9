"""What the store relies on in an allocator, checked against a plain list of what is taken.

A test class inherits it and provides `new_allocator(pool_size_bytes)`.
"""

import random
from typing import Any

from store_server.core.allocator import Extents, SlabAllocator


def spans(extents: Extents) -> list[tuple[int, int]]:
    return list(zip(extents[::2], extents[1::2], strict=True))


def check_no_overlap(all_extents: list[Extents], pool_size_bytes: int) -> None:
    taken = sorted(span for extents in all_extents for span in spans(extents))
    end = 0
    for offset, size in taken:
        assert offset >= end, "two live extents share bytes"
        assert size > 0
        end = offset + size
    assert end <= pool_size_bytes


class AllocatorContract:
    pool_size_bytes = 1 << 20

    def new_allocator(self, pool_size_bytes: int) -> SlabAllocator:
        raise AssertionError("a test class provides its allocator")

    def test_extents_have_exactly_the_size_asked_for(self) -> None:
        allocator = self.new_allocator(self.pool_size_bytes)
        for size in (1, 63, 64, 65, 4096, 5000, 16384, 70_000, 131_072, 300_001):
            extents = allocator.allocate(size, "owner")
            assert extents is not None
            assert sum(extents[1::2]) == size
            allocator.free(extents)
        assert allocator.used_bytes == allocator.requested_bytes == 0

    def test_live_extents_never_overlap(self) -> None:
        allocator, source = self.new_allocator(self.pool_size_bytes), random.Random(1)
        live: list[tuple[int, Extents]] = []
        for _ in range(4000):
            if live and source.random() < 0.45:
                size, extents = live.pop(source.randrange(len(live)))
                allocator.free(extents)
            else:
                size = int(2 ** source.uniform(0, 18))
                new = allocator.allocate(size, "owner")
                if new is not None:
                    live.append((size, new))
            assert allocator.requested_bytes == sum(size for size, _ in live)
        check_no_overlap([extents for _, extents in live], self.pool_size_bytes)
        for _, extents in live:
            allocator.free(extents)
        assert allocator.used_bytes == allocator.requested_bytes == 0
        assert allocator.num_free_slabs == allocator.num_slabs

    def test_a_pool_filled_with_one_size_can_be_emptied_and_filled_with_another(self) -> None:
        allocator = self.new_allocator(self.pool_size_bytes)
        counts = []
        for size in (4096, 300, 33_000, 200_000, 4096):
            live = []
            while (extents := allocator.allocate(size, "owner")) is not None:
                live.append(extents)
            assert len(live) * size > 0.7 * self.pool_size_bytes
            counts.append(len(live))
            for extents in live:
                allocator.free(extents)
        assert counts[0] == counts[-1], "room was stranded by the sizes in between"

    def test_missing_agrees_with_allocate(self) -> None:
        allocator, source = self.new_allocator(self.pool_size_bytes), random.Random(2)
        live: list[Extents] = []
        for _ in range(2000):
            size = int(2 ** source.uniform(4, 17))
            expects_room = allocator.missing(size) is None
            extents = allocator.allocate(size, "owner")
            assert (extents is not None) == expects_room
            if extents is not None:
                live.append(extents)
            elif live:
                allocator.free(live.pop(source.randrange(len(live))))

    def test_cost_is_what_used_bytes_grow_by(self) -> None:
        allocator = self.new_allocator(self.pool_size_bytes)
        for size in (1, 100, 4096, 40_000, 65_536, 100_000):
            before = allocator.used_bytes
            assert allocator.allocate(size, "owner") is not None
            assert allocator.used_bytes - before == allocator.cost_bytes(size)

    def test_a_full_pool_says_that_it_is_full(self) -> None:
        allocator = self.new_allocator(self.pool_size_bytes)
        for size in (64, 4096, 5000, 10_800):
            live = []
            while (extents := allocator.allocate(size, "owner")) is not None:
                live.append(extents)
            assert allocator.used_bytes > 0.99 * allocator.size_bytes
            for extents in live:
                allocator.free(extents)

    def test_freeing_the_neighbours_frees_the_slab(self) -> None:
        allocator = self.new_allocator(self.pool_size_bytes)
        by_owner: dict[Any, Extents] = {}
        while (extents := allocator.allocate(3000, len(by_owner))) is not None:
            by_owner[len(by_owner)] = extents
        assert allocator.num_free_slabs == 0
        neighbours = allocator.neighbours(by_owner[5])
        assert 5 in neighbours
        for owner in neighbours:
            allocator.free(by_owner.pop(owner))
        assert allocator.num_free_slabs == 1
        assert allocator.allocate(allocator.slab_bytes, "large") is not None

    def test_freeing_what_is_not_allocated_is_refused(self) -> None:
        allocator = self.new_allocator(self.pool_size_bytes)
        extents = allocator.allocate(100, "owner")
        kept = allocator.allocate(100, "owner")
        assert extents is not None and kept is not None
        allocator.free(extents)
        for wrong in (extents, (kept[0] + 8, 100), (self.pool_size_bytes // 2, 100)):
            try:
                allocator.free(wrong)
            except ValueError:
                continue
            raise AssertionError(f"{wrong} was freed")
