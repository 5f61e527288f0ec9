"""Which device pools a model has, for the linker. SGLang 0.5.23 answers for hybrid models only (Mamba,
DeepSeek's sparse attention and V4); for plain attention, MLA and sliding windows the answer is here, in
SGLang's own terms.
"""

from collections.abc import Mapping
from typing import Any

from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import (
    DevicePoolEntry,
    DevicePoolGroup,
    resolve_hybrid_device_pool_group,
)
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType


def device_pool_group(kv_pool: Any, params: Any, components: set[Any]) -> DevicePoolGroup:
    """`params`: SGLang's CacheInitParams. ValueError, which ends the engine's start, for a model whose pools
    cannot be moved: an engine without a cache tier that was asked for should not look as if it had one."""
    page_size = params.page_size
    has_drafts = params.mtp_draft_device_pools or params.sidecar_draft_device_pools
    # Exact types: a derived pool may keep more than its base does.
    if not has_drafts and components == {ComponentType.FULL} and type(kv_pool) is MHATokenToKVPool:
        entry = _mha_entry(PoolName.KV, kv_pool, _every_layer(kv_pool), page_size)
        return DevicePoolGroup([entry], kv_pool.layer_num, page_size)
    if not has_drafts and components == {ComponentType.FULL} and type(kv_pool) is MLATokenToKVPool:
        entry = _entry(PoolName.KV, kv_pool, kv_pool.kv_buffer, _every_layer(kv_pool), page_size)
        return DevicePoolGroup([entry], kv_pool.layer_num, page_size, rank_replicated=True)
    if (
        not has_drafts
        and components == {ComponentType.FULL, ComponentType.SWA}
        and type(kv_pool) is SWAKVPool
        and type(kv_pool.full_kv_pool) is type(kv_pool.swa_kv_pool) is MHATokenToKVPool
    ):
        layers: dict[bool, dict[int, int]] = {True: {}, False: {}}
        for layer, (index, is_swa) in kv_pool.layers_mapping.items():
            layers[is_swa][layer - kv_pool.start_layer] = index
        entries = [
            _mha_entry(PoolName.KV, kv_pool.full_kv_pool, layers[False], page_size),
            _mha_entry(PoolName.SWA, kv_pool.swa_kv_pool, layers[True], page_size),
        ]
        return DevicePoolGroup(entries, len(kv_pool.layers_mapping), page_size)
    return resolve_hybrid_device_pool_group(
        kvcache=kv_pool, page_size=page_size, params=params, components=components
    )


def _every_layer(pool: Any) -> dict[int, int]:
    return {layer: layer for layer in range(pool.layer_num)}


def _mha_entry(name: PoolName, pool: Any, layers: Mapping[int, int], page_size: int) -> DevicePoolEntry:
    if pool.k_scale_buffer is not None or pool.native_k_scale_buffer is not None:
        raise ValueError("the linker cannot move a KV cache with scales beside it: use HiCache instead")
    count = len(pool.k_buffer)
    both = {layer: (index, count + index) for layer, index in layers.items()}
    return _entry(name, pool, [*pool.k_buffer, *pool.v_buffer], both, page_size)


def _entry(
    name: PoolName, pool: Any, tensors: list[Any], layers: Mapping[int, Any], page_size: int
) -> DevicePoolEntry:
    return DevicePoolEntry(
        name=name,
        indices_from_pool=name,
        device_pool=pool,
        components=[tensors],
        layer_mapping=dict(layers),
        page_size=page_size,
        rows_are_pages=False,
    )
