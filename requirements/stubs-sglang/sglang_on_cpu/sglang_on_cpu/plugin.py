"""Binds the copies where SGLang binds its kernels, and keeps it from memory pinned for a GPU. Controller,
radix tree, host pools, storage backends, disaggregation and threads stay SGLang's own."""

import importlib
import inspect
from typing import Any

import torch

from sglang_on_cpu.copies import OPERATORS

POOL_MODULES = ("mha", "mla", "mamba", "dsa")


def _allocate(
    dims: Any,
    dtype: torch.dtype,
    device: str,
    pin_memory: bool,
    allocator: Any,
    registration_granularity_bytes: Any = None,
) -> torch.Tensor:
    """A host pool's memory, from SGLang's allocator (anonymous or shared), but not pinned for a GPU."""
    tensor: torch.Tensor = allocator.allocate(dims, dtype=dtype, device=device)
    return tensor


def _never_pin(pool_class: Any) -> None:
    """torch.empty(pin_memory=True) fails without an accelerator."""
    original = pool_class.__init__
    signature = inspect.signature(original)
    if "pin_memory" not in signature.parameters:
        return

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        bound.arguments["pin_memory"] = False
        original(*bound.args, **bound.kwargs)

    pool_class.__init__ = init


def _send_page_numbers_as_arrays() -> None:
    """Of its two ways of telling a transfer which pages to send, a prefill engine takes the one with a pinned
    tensor and a CUDA event where the sender has no objection."""
    conn = importlib.import_module("sglang.srt.disaggregation.mooncake.conn")
    conn.MooncakeKVSender.supports_host_tensor_indices = False


def activate() -> None:
    """SGLang calls it once a process; a test that uses SGLang's classes without an engine calls it itself."""
    common = importlib.import_module("sglang.srt.mem_cache.pool_host.common")
    if common.ALLOC_MEMORY_FUNCS.get("cpu") is _allocate:
        return
    common.ALLOC_MEMORY_FUNCS["cpu"] = _allocate
    base = importlib.import_module("sglang.srt.mem_cache.pool_host.base")
    # 10 GiB are meant for servers; the pools of a test are a few MB.
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
    pools = [importlib.import_module(f"sglang.srt.mem_cache.pool_host.{name}") for name in POOL_MODULES]
    for module in (*pools, importlib.import_module("sglang.srt.mem_cache.memory_pool_host")):
        for name, operator in OPERATORS.items():
            if not hasattr(module, name):
                setattr(module, name, operator)
    for module in (base, *pools):
        for pool_class in list(vars(module).values()):
            if inspect.isclass(pool_class) and pool_class.__module__ == module.__name__:
                _never_pin(pool_class)
    _send_page_numbers_as_arrays()
