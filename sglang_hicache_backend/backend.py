"""Where SGLang calls in with `--hicache-storage-backend dynamic` (0.5.23).

Only delegates. Nothing raises into SGLang's threads: what fails is a miss, or a page that is not stored.
Called from three threads at once: batch_exists* by the one that looks, batch_get* by the one that loads,
batch_set* by the one that saves (managers/cache_controller.py); get_stats by the scheduler's, at every turn.
"""

from collections.abc import Sequence
from typing import Any

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolTransfer,
    PoolTransferResult,
)

from sglang_hicache_backend import compat
from sglang_hicache_backend.attachment import Attachment
from sglang_hicache_backend.keys import KV_POOL
from sglang_hicache_backend.served_weights import SERVED
from sglang_hicache_backend.weight_updates import warn_if_unwatched


class MooncakeSuiteHiCache(HiCacheStorage):
    """HiCache pages in a mooncake-store; docs/sglang.md has every key of the extra config.

    With `interface_v1` pages are read into and written from SGLang's host pools where they lie; without,
    SGLang copies them to flat pages and back. Pools besides the KV pool (sliding window, recurrent state,
    indexer, draft) are used in place where their layout allows it, whatever interface_v1 says.

    A configuration that cannot be used is logged as an error and leaves a backend that has nothing: an engine
    without storage serves, one that does not start does not.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        warn_if_unwatched()
        self._suite = Attachment(
            storage_config.extra_config,
            compat.rank_facts(storage_config),
            compat.served_engine,
            is_metered=bool(storage_config.enable_storage_metrics),
            num_heads_split=compat.num_heads_split(storage_config),
            weights_version=lambda: SERVED.now.version,
        )

    # ---- pools: registered before the threads start; some come later, from the scheduler's thread

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._suite.add_pool(mem_pool_host, KV_POOL, compat.first_page(mem_pool_host))

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        # The KV pool is announced here once more.
        if host_pool is not getattr(self, "mem_pool_host", None):
            self._suite.add_pool(host_pool, str(host_pool_name), compat.first_page(host_pool))

    def on_host_pools_registered(self) -> None:
        self._suite.describe()

    # ---- v1: pages of the KV pool, in place

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        return self._suite.num_leading(keys)

    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return self._suite.load(KV_POOL, keys, host_indices)

    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return self._suite.save(KV_POOL, keys, host_indices, _prefix(extra_info))

    # ---- v2: pages of the other pools

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        windows = [
            (str(transfer.name), transfer.hit_policy.value, len(transfer.keys or ()))
            for transfer in pool_transfers or ()
        ]
        found = self._suite.restorable(keys, windows)
        return PoolTransferResult(found.num_pages, found.by_pool, found.lengths)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return {
            transfer.name: self._suite.load(str(transfer.name), transfer.keys or [], transfer.host_indices)
            for transfer in transfers
        }

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return {
            transfer.name: self._suite.save(str(transfer.name), transfer.keys or [], transfer.host_indices)
            for transfer in transfers
        }

    # ---- the generic interface: flat pages of the KV pool, in tensors

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        arrived = self._suite.load_flat(keys, target_locations or [])
        return [target if ok else None for target, ok in zip(target_locations or [], arrived, strict=False)]

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        return all(self._suite.save_flat(keys, values or []))

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        found = self.batch_get([key], [target_location])
        return found[0] if found else None

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value])

    def exists(self, key: str) -> bool:
        return self._suite.num_leading([key]) == 1

    # ---- the rest

    def clear(self) -> None:
        """Removes the pages that engines like this one have stored; those of others stay."""
        self._suite.clear()

    def get_stats(self) -> Any:
        taken = self._suite.stats.take()
        return None if taken is None else compat.storage_metrics(*taken)

    def close(self) -> None:
        """Ends what is in flight; afterwards everything is a miss."""
        self._suite.close()


def _prefix(extra_info: HiCacheStorageExtraInfo | None) -> Sequence[str] | None:
    return extra_info.prefix_keys if extra_info is not None else None
