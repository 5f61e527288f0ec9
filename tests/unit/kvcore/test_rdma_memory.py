"""Registered memory and the bounce buffer, against plain models."""

import gc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.transport.rdma_host import RdmaHost
from kvcore.transport.rdma_memory import (
    PAGE_BYTES,
    BounceBuffer,
    MemoryMap,
    Ranges,
    Registered,
    address_of,
)
from kvcore.transport.rdma_pieces import SLICE_BYTES, Plan
from kvcore.transport.verbs import RdmaUnavailable
from kvcore.transport.verbs_fake import FakeFabric

PAGES = 16


@given(st.lists(st.one_of(st.integers(1, 5 * PAGE_BYTES), st.integers(-20, -1)), max_size=60))
def test_ranges_are_disjoint_and_all_of_them_come_back(steps: list[int]) -> None:
    """A positive step takes so many bytes, a negative one gives one of the ranges back."""
    ranges = Ranges(PAGES * PAGE_BYTES)
    taken: list[tuple[int, int]] = []
    used: set[int] = set()

    def pages(offset: int, size_bytes: int) -> set[int]:
        return set(range(offset // PAGE_BYTES, -(-(offset + size_bytes) // PAGE_BYTES)))

    for step in steps:
        if step > 0:
            offset = ranges.take(step)
            wanted = -(-step // PAGE_BYTES)
            runs = "".join("x" if page in used else "." for page in range(PAGES)).split("x")
            assert (offset is not None) == any(len(run) >= wanted for run in runs)
            if offset is not None:
                assert not pages(offset, step) & used and offset + step <= PAGES * PAGE_BYTES
                used |= pages(offset, step)
                taken.append((offset, step))
        elif taken:
            offset, size_bytes = taken.pop(step % len(taken))
            used -= pages(offset, size_bytes)
            ranges.give_back(offset, size_bytes)
        assert ranges.free_bytes == (PAGES - len(used)) * PAGE_BYTES
    for offset, size_bytes in taken:
        ranges.give_back(offset, size_bytes)
    assert ranges.take(PAGES * PAGE_BYTES) == 0


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), max_size=8),
    st.integers(0, 60),
    st.integers(1, 10),
)
def test_a_registration_is_found_where_it_covers(
    ranges: list[tuple[int, int]], address: int, size_bytes: int
) -> None:
    memory = MemoryMap()
    entries = [Registered(begin, size, [number]) for number, (begin, size) in enumerate(ranges)]
    for entry in entries:
        memory.add(entry)
    if entries:
        memory.remove(entries.pop(0))
    covering = [entry for entry in entries if entry.begin <= address and address + size_bytes <= entry.end]
    found = memory.find(address, size_bytes)
    assert (found in covering) if covering else found is None


def test_a_room_comes_back_when_it_is_closed_or_forgotten() -> None:
    bounce = BounceBuffer(4 * PAGE_BYTES)
    first, second = bounce.take(PAGE_BYTES + 1), bounce.take(PAGE_BYTES)
    assert first is not None and second is not None
    assert bounce.take(2 * PAGE_BYTES) is None
    assert second.address == bounce.address + 2 * PAGE_BYTES and len(first.view) == PAGE_BYTES + 1
    first.close()
    first.close()
    assert bounce.free_bytes == 3 * PAGE_BYTES
    del second
    gc.collect()
    assert bounce.free_bytes == 4 * PAGE_BYTES


@pytest.fixture
def fabric() -> FakeFabric:
    return FakeFabric("a0", "a1")


def test_memory_is_registered_with_every_device_and_stays_the_callers(fabric: FakeFabric) -> None:
    host = RdmaHost(fabric)
    buffer = bytearray(8192)
    region = host.register(buffer)
    entry = host.memory.find(address_of(memoryview(buffer)) + 100, 8000)
    assert entry is not None and None not in entry.keys and len(entry.keys) == 2
    region.close()
    region.close()
    assert host.memory.find(entry.begin, 1) is None
    assert all(not device.regions for device in fabric.devices.values())
    buffer.append(1)
    view = memoryview(bytearray(100))
    host.register(view).close()
    assert view[0] == 0
    host.close()


def test_what_one_device_refuses_is_still_used_by_the_other(
    fabric: FakeFabric, caplog: pytest.LogCaptureFixture
) -> None:
    host = RdmaHost(fabric)
    fabric.devices["a1"].is_full = True
    buffer = bytearray(100)
    region = host.register(buffer)
    entry = host.memory.find(address_of(memoryview(buffer)), 100)
    assert entry is not None and entry.keys[0] is not None and entry.keys[1] is None
    assert "cannot register" in caplog.text
    fabric.devices["a0"].is_full = True
    assert host.register(bytearray(50)).size_bytes == 50
    assert host.bounce() is None
    region.close()
    host.close()


def test_no_device_at_all_says_why(fabric: FakeFabric) -> None:
    for device in fabric.devices.values():
        device.active = False
    with pytest.raises(RdmaUnavailable, match="none of the RDMA devices has an active port: a0, a1"):
        RdmaHost(fabric)


@pytest.mark.parametrize("registered", [True, False])
def test_a_plan_covers_every_byte_once(fabric: FakeFabric, registered: bool) -> None:
    host = RdmaHost(fabric)
    size_bytes = 2 * SLICE_BYTES + 12_345
    memory = np.random.default_rng(1).integers(0, 256, size_bytes, np.uint8)
    region = host.register(memory) if registered else None
    plan = Plan(host)
    cut = SLICE_BYTES + 7
    plan.add([(1000, 500_000), (9_000_000, size_bytes - 500_000)], [memory[:cut].data, memory[cut:].data])
    assert plan.take_room()
    plan.copy_in()
    assert (plan.room is None) == registered
    pool_bytes: dict[int, int] = {}
    for piece in plan.pieces():
        assert 0 < piece.size_bytes <= SLICE_BYTES
        assert host.memory.find(piece.local_address, piece.size_bytes) is not None
        base = plan.room.address if plan.room is not None else memory.ctypes.data
        for index in (0, piece.size_bytes - 1):
            pool_bytes[piece.pool_offset + index] = piece.local_address + index - base
    assert pool_bytes[1000] == 0 and pool_bytes[500_999] == 499_999
    assert pool_bytes[9_000_000] == 500_000 and pool_bytes[9_000_000 + size_bytes - 500_001] == size_bytes - 1
    assert sum(piece.size_bytes for piece in plan.pieces()) == size_bytes
    if plan.room is not None:
        assert bytes(plan.room.view) == memory.tobytes()
        plan.room.view[:] = bytes(size_bytes)
        plan.copy_out()
        assert not memory.any()
    plan.close()
    if region is not None:
        region.close()
    host.close()


def test_a_plan_that_does_not_fit_says_so(fabric: FakeFabric) -> None:
    host = RdmaHost(fabric)
    bounce = host.bounce()
    assert bounce is not None
    held = bounce.take(bounce.size_bytes)
    plan = Plan(host)
    plan.add([(0, 100)], [memoryview(bytearray(100))])
    assert not plan.take_room()
    assert held is not None
    held.close()
    assert plan.take_room()
    plan.close()
    host.close()
