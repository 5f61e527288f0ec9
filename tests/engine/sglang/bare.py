"""SGLang's cache without a model: its radix tree, its cache controller with all threads, its host pools, and
our backend. Two of them, one after the other, on one store, are two engines.

The tree is built by fixtures that come with SGLang's wheel; what is compared, and how, is ours.
"""

import json
import time
import unittest
import warnings
from array import array
from collections.abc import Callable, Mapping
from typing import Any

from tests.engine.rig import StoreProcess

with warnings.catch_warnings():
    # SGLang and parts of torch complain while they are imported: no GPU here, names that are going away.
    warnings.simplefilter("ignore")
    import torch
    from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName, PoolTransfer
    from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import _build_mha_mla_host_pool
    from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import DevicePoolEntry as DevicePoolEntry
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, MHATokenToKVPool, MLATokenToKVPool
    from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost, make_dsa_indexer_pool_decl
    from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
    from sglang.srt.runtime_context import get_parallel, get_server_args
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
    from sglang.test.kits.unified_radix_cache.config import CacheConfig
    from sglang.test.kits.unified_radix_cache.fixtures import (
        build_fixture,
        drop_hicache_atexit_pin,
        match_prefix,
        node_device_value,
    )
    from sglang.test.kits.unified_radix_cache.storage import UnifiedRadixCacheStorageFixtures
    from sglang_on_cpu.plugin import activate

    from sglang_hicache_backend import compat as compat
    from sglang_hicache_backend.backend import MooncakeSuiteHiCache
    from sglang_hicache_backend.device_pages import DevicePages as DevicePages
    from sglang_hicache_backend.device_pages import SideStream as SideStream
    from sglang_hicache_backend.linker import MooncakeSuiteLinker

CONFIGS = {
    "full": CacheConfig(page_size=16, components=(ComponentType.FULL,), num_layers=4),
    "swa": CacheConfig(
        page_size=16, components=(ComponentType.FULL, ComponentType.SWA), sliding_window_size=32, kv_size=512
    ),
    "mamba": CacheConfig(
        page_size=64,
        components=(ComponentType.FULL, ComponentType.MAMBA),
        enable_mamba_extra_buffer=True,
        mamba_cache_size=60,
        kv_size=1024,
        max_context_len=1024,
    ),
}
LOAD_SECONDS = 60.0


def suite_extra_config(store: StoreProcess, **extra: Any) -> dict[str, Any]:
    return {
        "backend_name": "mooncake_suite",
        "module_path": "sglang_hicache_backend.backend",
        "class_name": "MooncakeSuiteHiCache",
        "interface_v1": 1,
        "store_address": store.address,
        "weights_id": "bare classes",
        "prefetch_threshold": 1,
        "lookup_timeout_ms": "20s",
        "load_timeout_ms": "60s",
        "save_timeout_ms": "60s",
        **extra,
    }


class BareEngine(UnifiedRadixCacheStorageFixtures, unittest.TestCase):  # type: ignore[misc]
    """One engine's cache of `kind` ("full", "swa", "mamba"); `memory` are the device pools' tensors by pool,
    each with the axis of its slots."""

    __test__ = False  # a TestCase for the sake of SGLang's fixtures only

    def __init__(self, kind: str, layout: str, io_backend: str, extra_config: Mapping[str, Any]) -> None:
        super().__init__("run")
        activate()
        self.cfg = CONFIGS[kind]
        self.cache, self.allocator, self.req_pool = build_fixture(self.cfg, tree_core_backend="python")
        with get_parallel().override(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1):
            arguments = ServerArgs(
                model_path="dummy",  # to SGLang: there is no checkpoint to look at
                page_size=self.cfg.page_size,
                hicache_io_backend=io_backend,
                hicache_mem_layout=layout,
                hicache_write_policy="write_through",
                hicache_storage_backend="dynamic",
                hicache_storage_backend_extra_config=json.dumps(extra_config),
                hicache_storage_prefetch_policy="wait_complete",
            )
            arguments._mamba_cache_chunk_size = max(64, self.cfg.page_size)
            set_global_server_args_for_scheduler(arguments)
            self.cache.init_hicache(arguments, self.cache.cache_init_params)
        drop_hicache_atexit_pin(self.cache)
        # Backups are made by hand; nothing is too short to be loaded.
        self.cache.write_through_threshold = 1 << 30
        self.cache.load_back_threshold = 0
        controller = self.cache.cache_controller
        controller.prefetch_capacity_limit = max(
            controller.prefetch_capacity_limit, controller.mem_pool_host.size
        )
        self.controller = controller
        self.backend = controller.storage_backend

    @property
    def memory(self) -> dict[str, list[tuple[torch.Tensor, int]]]:
        pool = self.allocator.get_kvcache()
        full = getattr(pool, "full_kv_pool", pool)
        found = {"kv": [(tensor, 0) for tensor in (*full.k_buffer, *full.v_buffer)]}
        if self.cfg.has_swa:
            window = pool.swa_kv_pool
            found["swa"] = [(tensor, 0) for tensor in (*window.k_buffer, *window.v_buffer)]
        if self.cfg.has_mamba:
            state = self.req_pool.mamba_pool.mamba_cache
            found["mamba"] = [(tensor, 1) for tensor in (state.temporal, *state.conv)]
        return found

    def fill(self, seed: int | None) -> None:
        """Every byte of the device: random, or zero."""
        generator = torch.Generator().manual_seed(seed or 0)
        for tensor, _ in (entry for entries in self.memory.values() for entry in entries):
            tensor.zero_()
            if seed is not None:
                tensor.copy_(torch.randn(tensor.shape, generator=generator).to(tensor.dtype))

    def tokens(self, num_pages: int) -> list[int]:
        return list(range(1, 1 + num_pages * self.cfg.page_size))

    def insert(self, tokens: list[int]) -> None:
        """As if they had just been computed."""
        self._insert(self.cache, self.allocator, self.req_pool, tokens)

    def save(self, tokens: list[int]) -> list[str]:
        """Device to host to store; the hashes of the pages."""
        node = match_prefix(self.cache, tokens).last_device_node
        for each in self._path_chain(self.cache, node):
            self._backup_node(self.cache, each)
        self._write_path_to_l3(self.cache, node)
        self._flush_l3_backups(self.cache, LOAD_SECONDS)
        return list(self._all_page_hashes(self.cache, node))

    def prefetch(self, tokens: list[int], rid: str = "request") -> int:
        """Store to host; how many tokens."""
        handle = CacheRequestHandle(rid, 0)
        self.cache.prefetch_from_storage(
            handle, self.cache.root_node_handle(), array("q", tokens), None, None
        )
        self._run_prefetch_to_completion(self.cache, handle, LOAD_SECONDS)
        return int(self.cache.pop_prefetch_loaded_tokens(handle))

    def load_back(self, tokens: list[int]) -> int:
        """Host to device; how many tokens of the prefix are now there."""
        self._load_back_through_admission(self.cache, self.req_pool, tokens)
        self._finish_pending_loads(self.cache)
        return int(match_prefix(self.cache, tokens).device_prefix_len)

    def device_bytes(self, tokens: list[int]) -> dict[str, list[torch.Tensor]]:
        """What each pool holds on the device for this prefix, as bytes."""
        node = match_prefix(self.cache, tokens).last_device_node
        slots = {"kv": self.cache.path_device_indices(node)}
        for name, component in (("swa", ComponentType.SWA), ("mamba", ComponentType.MAMBA)):
            if component in self.cfg.components:
                values = [
                    node_device_value(self.cache, each, component)
                    for each in self._path_chain(self.cache, node)
                ]
                slots[name] = torch.cat([value.flatten() for value in values if value is not None])
        return {
            name: [
                tensor.index_select(axis, slots[name].long()).contiguous().view(torch.uint8)
                for tensor, axis in entries
            ]
            for name, entries in self.memory.items()
        }

    def close(self) -> None:
        self.cache.shutdown()


PAGE_TOKENS, LAYERS, HEADS, HEAD_DIM, SLOTS = 64, 3, 4, 8, 512


class BareRank:
    """One rank's host pools, without device, tree or threads, and its backend, called as SGLang calls it.

    `kind`: "mha", "mla", or "dsa" (MLA with DeepSeek's sparse attention: an indexer pool beside it).
    """

    def __init__(
        self,
        extra_config: Mapping[str, Any],
        *,
        layout: str = "page_first",
        kind: str = "mha",
        heads: int = HEADS,
        **rank: Any,
    ) -> None:
        """`rank`: fields of HiCacheStorageConfig that are not those of a single rank."""
        activate()
        set_global_server_args_for_scheduler(ServerArgs(model_path="dummy", page_size=PAGE_TOKENS))
        device_pool = self._device_pool(kind, heads)
        self.pool = _build_mha_mla_host_pool(
            pool=device_pool,
            host_to_device_ratio=1.0,
            page_size=PAGE_TOKENS,
            layout=layout,
            allocator_type="default",
            pool_label="kv",
        )
        self.pools = {"kv": self.pool}
        if kind == "dsa":
            self.pools["indexer"] = DSAIndexerPoolHost(make_dsa_indexer_pool_decl(device_pool), self.pool)
        single = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1}
        single |= {"attn_cp_rank": 0, "attn_cp_size": 1}
        self.config = HiCacheStorageConfig(
            **single | rank,
            is_mla_model=kind != "mha",
            enable_storage_metrics=True,
            is_page_first_layout=layout == "page_first",
            model_name="dummy",
            extra_config=dict(extra_config),
        )
        self.backend = MooncakeSuiteHiCache(self.config, {})
        self.backend.register_mem_pool_host(self.pool)
        for name, pool in self.pools.items():
            self.backend.register_mem_host_pool_v2(pool, PoolName(name))
        self.backend.on_host_pools_registered()

    @staticmethod
    def _device_pool(kind: str, heads: int) -> Any:
        geometry: dict[str, Any] = {"size": SLOTS, "page_size": PAGE_TOKENS, "dtype": torch.bfloat16}
        geometry |= {"layer_num": LAYERS, "device": "cpu", "enable_memory_saver": False}
        if kind == "mha":
            return MHATokenToKVPool(head_num=heads, head_dim=HEAD_DIM, **geometry)
        geometry |= {"kv_lora_rank": 64, "qk_rope_head_dim": 16}
        if kind == "mla":
            return MLATokenToKVPool(**geometry)
        return DSATokenToKVPool(index_head_dim=128, kv_cache_dim=80, **geometry)

    def fill(self, seed: int) -> "BareRank":
        generator = torch.Generator().manual_seed(seed)
        for name, pool in self.pools.items():
            buffer = pool.index_k_with_scale_buffer if name == "indexer" else pool.kv_buffer
            values = torch.randint(0, 256, (buffer.nbytes,), generator=generator, dtype=torch.uint8)
            buffer.view(torch.uint8).copy_(values.view(buffer.view(torch.uint8).shape))
        return self

    def slots(self, *pages: int) -> torch.Tensor:
        return torch.cat([torch.arange(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS) for page in pages])

    def page(self, page: int, pool_name: str = "kv") -> torch.Tensor:
        """Bytes of a page in SGLang's own flat form."""
        flat = self.pools[pool_name].get_data_page(page * PAGE_TOKENS)
        found: torch.Tensor = flat.contiguous().view(torch.uint8)
        return found

    def save(self, hashes: list[str], *pages: int) -> list[bool]:
        """As the cache controller does: ranks that are no writers are not asked."""
        assert self.config.is_storage_writer
        return self.backend.batch_set_v1(hashes, self.slots(*pages))

    def load(self, hashes: list[str], *pages: int) -> list[bool]:
        return self.backend.batch_get_v1(hashes, self.slots(*pages))

    def transfer(self, pool_name: str, hashes: list[str], *pages: int) -> PoolTransfer:
        return PoolTransfer(PoolName(pool_name), host_indices=self.slots(*pages), keys=hashes)


class LinkedEngine:
    """Device pools of one engine and the linker on them, called as SGLang's scheduler calls it."""

    def __init__(self, kind: str, extra_config: Mapping[str, Any]) -> None:
        activate()
        self.cfg = CONFIGS[kind]
        self.cache, self.allocator, _ = build_fixture(self.cfg, tree_core_backend="python")
        with get_parallel().override(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1):
            self.linker = MooncakeSuiteLinker(
                get_server_args(),
                self.cache.cache_init_params,
                components=set(self.cfg.components),
                extra_config=dict(extra_config),
            )

    def tensors(self, pool_name: str) -> list[torch.Tensor]:
        pool = self.allocator.get_kvcache()
        pool = pool.swa_kv_pool if pool_name == "swa" else getattr(pool, "full_kv_pool", pool)
        return [*pool.k_buffer, *pool.v_buffer]

    def page(self, tensor: torch.Tensor, page: int) -> torch.Tensor:
        size = self.cfg.page_size
        return tensor[page * size : (page + 1) * size].contiguous().view(torch.uint8)

    def fill(self, seed: int | None) -> None:
        generator = torch.Generator().manual_seed(seed or 0)
        for name in ("kv", *(["swa"] if self.cfg.has_swa else [])):
            for tensor in self.tensors(name):
                tensor.zero_()
                if seed is not None:
                    tensor.copy_(torch.randn(tensor.shape, generator=generator).to(tensor.dtype))

    def transfers(self, pools: list[str], hashes: list[str], pages: tuple[int, ...]) -> list[PoolTransfer]:
        """No pages: a question."""
        size = self.cfg.page_size
        slots = [torch.arange(page * size, (page + 1) * size) for page in pages]
        indices = torch.cat(slots) if slots else None
        return [
            PoolTransfer(name=PoolName(name), keys=list(hashes), device_indices=indices) for name in pools
        ]

    def wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LOAD_SECONDS
        while not condition():
            assert time.monotonic() < deadline, "this should have happened by now"
            time.sleep(0.01)
