"""What stands for packages that SGLang imports and does not run here."""

import importlib
import sys

import pytest
import torch

pytestmark = pytest.mark.sglang


def test_kernels_can_be_imported_and_refuse_to_run() -> None:
    triton = importlib.import_module("triton")
    language = importlib.import_module("triton.language")

    @triton.jit
    def double(x: int) -> int:
        return 2 * x

    @triton.autotune(configs=[triton.Config({"BLOCK": 64})], key=["n"])
    def triple(x: int) -> int:
        return 3 * x

    assert (double(2), triple(2)) == (4, 6), "a decorated function is still itself"
    assert (triton.cdiv(7, 2), triton.next_power_of_2(5), triton.next_power_of_2(8)) == (4, 8, 8)
    assert language.constexpr is not None
    kernels = importlib.import_module("sgl_kernel")
    with pytest.raises(RuntimeError, match="stub for imports"):
        kernels.weight_packed_linear_cpu()
    with pytest.raises(AttributeError):
        kernels.gelu_and_mul  # noqa: B018


def test_installed_packages_win() -> None:
    order = [getattr(finder, "__name__", type(finder).__name__) for finder in sys.meta_path]
    assert order.index("PathFinder") < order.index("StubFinder") < order.index("KernelFinder")
    assert importlib.import_module("tokenizers").__version__ != "0.0.0"


def test_slots_go_to_the_rows_that_asked_for_them() -> None:
    kernels = importlib.import_module("sgl_kernel")
    table = torch.zeros(4, 8, dtype=torch.int32)
    start, end = torch.tensor([0, 2]), torch.tensor([3, 4])
    kernels.assign_req_to_token_pool_cpu(
        torch.tensor([2, 1]), table, start, end, torch.tensor([11, 12, 13, 14, 15]), 8
    )
    assert table[2].tolist() == [11, 12, 13, 0, 0, 0, 0, 0]
    assert table[1].tolist() == [0, 0, 14, 15, 0, 0, 0, 0]
    assert not table[0].any()
    assert not table[3].any()
