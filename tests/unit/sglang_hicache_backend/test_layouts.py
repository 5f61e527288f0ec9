"""Runs of bytes are cut out of the pool's buffers, and out of nothing else."""

import gc

import numpy as np
import pytest

from sglang_hicache_backend.layouts import HostMemory, LayoutError, grouped, tensor_bytes
from sglang_hicache_backend.pools import pool_is_replicated
from tests.unit.sglang_hicache_backend.rig import HostTensor


def tensor(size: int) -> HostTensor:
    return HostTensor(np.arange(size, dtype=np.uint16))


def test_runs_are_the_memory_itself() -> None:
    first, second = tensor(8), tensor(4)
    memory = HostMemory([second, first, tensor(0)])
    runs = memory.runs([first.data_ptr() + 4, second.data_ptr()], [4, 8])
    assert bytes(runs[0]) == first.array[2:4].tobytes()
    runs[1][:2] = b"\xff\xff"
    assert second.array[0] == 0xFFFF


@pytest.mark.parametrize("offset, size", [(-2, 4), (0, 17), (14, 4), (1 << 40, 1), (-(1 << 40), 1)])
def test_what_is_not_wholly_inside_is_refused(offset: int, size: int) -> None:
    only = tensor(8)
    with pytest.raises(LayoutError, match="in none of the pool's buffers"):
        HostMemory([only]).runs([only.data_ptr() + offset], [size])


def test_a_pool_without_buffers_has_no_runs() -> None:
    with pytest.raises(LayoutError):
        HostMemory([]).runs([4096], [1])


def test_a_view_keeps_its_tensor_alive() -> None:
    view = tensor_bytes(tensor(1000))
    gc.collect()
    assert bytes(view) == np.arange(1000, dtype=np.uint16).tobytes()


def test_only_contiguous_memory_has_bytes() -> None:
    with pytest.raises(LayoutError, match="contiguous"):
        tensor_bytes(HostTensor(np.zeros((4, 4), dtype=np.uint16)[:, :2]))


def test_runs_are_shared_out_evenly() -> None:
    runs = [memoryview(bytes([number])) for number in range(6)]
    assert [list(map(bytes, group)) for group in grouped(runs, 2)] == [
        [b"\0", b"\1", b"\2"],
        [b"\3", b"\4", b"\5"],
    ]
    for count in (0, 4):
        with pytest.raises(LayoutError, match="cannot be shared out"):
            grouped(runs, count)


class MLATokenToKVPoolHost:
    pass


class DerivedPool(MLATokenToKVPoolHost):
    pass


@pytest.mark.parametrize(
    "name, pool, of_mha, of_mla",
    [
        ("kv", object(), False, True),
        ("swa", object(), False, True),
        ("indexer", object(), False, True),
        ("mamba", object(), False, False),
        ("draft", object(), False, False),
        ("draft", DerivedPool(), False, True),
        ("draft_swa", MLATokenToKVPoolHost(), False, True),
    ],
)
def test_which_pools_all_ranks_hold_alike(name: str, pool: object, of_mha: bool, of_mla: bool) -> None:
    assert pool_is_replicated(name, pool, model_is_replicated=False) == of_mha
    assert pool_is_replicated(name, pool, model_is_replicated=True) == of_mla
