import pytest
from hypothesis import given
from hypothesis import strategies as st

from store_server.core.allocator import WHOLE_SLAB, Extents, SlabAllocator
from store_server.core.size_classes import SizeClasses
from tests.contracts.allocator_contract import AllocatorContract, check_no_overlap


class TestSlabAllocatorContract(AllocatorContract):
    def new_allocator(self, pool_size_bytes: int) -> SlabAllocator:
        return SlabAllocator(pool_size_bytes, slab_bytes=64 << 10)


class TestSmallSlabsContract(AllocatorContract):
    def new_allocator(self, pool_size_bytes: int) -> SlabAllocator:
        return SlabAllocator(pool_size_bytes, slab_bytes=16 << 10)


@pytest.mark.parametrize("slab_bytes", [4 << 10, 64 << 10, 16 << 20])
def test_no_plan_wastes_more_than_an_eighth_and_a_cache_line(slab_bytes: int) -> None:
    classes = SizeClasses(slab_bytes)
    for size in range(1, 3 * slab_bytes, max(slab_bytes // 997, 1)):
        num_whole, tail, cost = classes.plan(size)
        room = num_whole * slab_bytes + sum(classes.chunk_bytes[index] for index in tail)
        assert cost >= room >= size
        assert len(tail) <= 3
        assert room - size <= size / 6 + 64, f"{size} bytes take {room}"


def test_common_kv_block_sizes_fit() -> None:
    classes = SizeClasses(16 << 20)
    for size in (4 << 10, 640 << 10, 1 << 20, 2 << 20, 96 << 10, 32 << 20):
        assert size <= classes.plan(size)[2] <= 1.03 * size, "no more than the slab's end is wasted"


def test_large_objects_take_neighbouring_slabs_of_an_empty_pool() -> None:
    allocator = SlabAllocator(1 << 20, slab_bytes=64 << 10)
    extents = allocator.allocate(5 * (64 << 10), "owner")
    assert extents is not None and len(extents) == 2


def test_large_objects_are_scattered_when_they_have_to() -> None:
    slab = 64 << 10
    allocator = SlabAllocator(8 * slab, slab_bytes=slab)
    slabs = [allocator.allocate(slab, number) for number in range(8)]
    for extents in slabs[::2]:
        assert extents is not None
        allocator.free(extents)
    scattered = allocator.allocate(3 * slab, "owner")
    assert scattered is not None and len(scattered) == 6
    assert allocator.missing(2 * slab) == WHOLE_SLAB


def test_objects_of_one_batch_lie_side_by_side() -> None:
    allocator = SlabAllocator(1 << 20)
    offsets = []
    for number in range(16):
        extents = allocator.allocate(4096, number)
        assert extents is not None
        offsets.append(extents[0])
    assert offsets == [offsets[0] + 4096 * number for number in range(16)]


def test_stranded_bytes_are_the_free_chunks_of_taken_slabs() -> None:
    allocator = SlabAllocator(1 << 20, slab_bytes=64 << 10)
    allocator.allocate(4096, "owner")
    assert allocator.stranded_bytes() == (64 << 10) - 4096


@pytest.mark.parametrize(("pool", "slab"), [(1 << 20, 3000), (1 << 20, 1024), (4096, 8192)])
def test_impossible_geometry_is_refused(pool: int, slab: int) -> None:
    with pytest.raises(ValueError, match="slab"):
        SlabAllocator(pool, slab_bytes=slab)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 200_000)), max_size=60))
def test_any_history_keeps_extents_apart_and_leaks_nothing(history: list[tuple[bool, int]]) -> None:
    allocator = SlabAllocator(512 << 10, slab_bytes=32 << 10)
    live: list[Extents] = []
    for takes, number in history:
        if takes:
            extents = allocator.allocate(number, "owner")
            if extents is not None:
                assert sum(extents[1::2]) == number
                live.append(extents)
        elif live:
            allocator.free(live.pop(number % len(live)))
        check_no_overlap(live, allocator.size_bytes)
    for extents in live:
        allocator.free(extents)
    assert allocator.used_bytes == 0 and allocator.num_free_slabs == allocator.num_slabs
