"""One backend of one rank: built from what SGLang says, shielded so that nothing raises into its threads."""

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec

from kvcore.client.sync_client import StoreClient
from kvcore.errors import ConfigError, RequestRefused
from kvcore.guard import Guard
from kvcore.transport.protocol import device_of_rank
from sglang_hicache_backend.config import BackendConfig, backend_config
from sglang_hicache_backend.hits import POLICIES, Restorable
from sglang_hicache_backend.keys import KV_POOL, EngineFacts, PoolFacts, RankFacts
from sglang_hicache_backend.layouts import LayoutError, tensor_bytes
from sglang_hicache_backend.log import get_logger
from sglang_hicache_backend.page_store import PageStore
from sglang_hicache_backend.pools import open_pages, pool_is_replicated
from sglang_hicache_backend.stats import TransferStats

logger = get_logger(__name__)
P = ParamSpec("P")
T = TypeVar("T")
NOTHING = Restorable(0, {}, [])


class Attachment:
    """All methods may be called from any thread, except `add_pool` (one at a time) and `close` (the last).

    `identify` reads the engine's identity; ConfigError from it, or from the configuration, is logged, and all
    pages are misses from then on. It is read anew, and pages get other names, when `weights_version` has
    changed. `num_heads_split`: see PoolFacts.
    """

    def __init__(
        self,
        extra_config: Mapping[str, Any] | None,
        rank: RankFacts,
        identify: Callable[[BackendConfig], EngineFacts],
        *,
        is_metered: bool = False,
        num_heads_split: int = 1,
        connect: Callable[[BackendConfig, str], Any] | None = None,
        weights_version: Callable[[], int] = lambda: 0,
    ) -> None:
        self.stats = TransferStats(is_metered)
        self.guard = Guard(logger, self._count)
        self.errors_total = 0
        self._rank = rank
        self._num_heads_split = num_heads_split
        self._kv_is_flat = not (extra_config or {}).get("interface_v1", 0)
        self.store: PageStore | None = None
        self.load_timeout_ms = 0.0
        self._address = ""
        self._weights_version = weights_version
        self._named_version = weights_version()
        self._renaming = threading.Lock()
        try:
            config = backend_config(extra_config)
            device_name = device_of_rank(config.device_name, rank.tp_rank)
            config = msgspec.structs.replace(config, device_name=device_name)
            self._identify = functools.partial(identify, config)
            engine = self._identify()
            connector = connect or open_client
            self.store = PageStore(
                lambda purpose: connector(config, f"sglang tp{rank.tp_rank} pp{rank.pp_rank} {purpose}"),
                config,
                engine,
                rank,
                self.stats,
            )
            self._address = config.store_address
            self.load_timeout_ms = config.load_timeout_ms
        except ConfigError as error:
            logger.error("HiCache stores nothing and finds nothing until this is put right: %s", error)
        except Exception as error:
            self.guard.report("start", error)

    def add_pool(self, pool: Any, name: str, first_page: Any) -> None:
        """A pool whose pages cannot be stored is logged as an error; they are misses."""
        if self.store is None:
            return
        try:
            pages = open_pages(
                pool,
                name,
                first_page,
                is_replicated=pool_is_replicated(name, pool, self._rank.is_replicated),
                num_heads_split=self._num_heads_split if name == KV_POOL else 1,
                is_flat=self._kv_is_flat and name == KV_POOL,
            )
        except LayoutError as error:
            logger.error("these pages cannot be stored: %s", error)
        except Exception as error:
            self.guard.report("add_pool", error)
        else:
            self.store.add_pool(pages.facts, pages)

    def add_device_pools(self, pools: Sequence[PoolFacts]) -> None:
        """Pools whose bytes the caller moves by itself."""
        for facts in pools:
            if self.store is not None:
                self.store.add_pool(facts)

    def describe(self) -> None:
        """Logs where which pages go."""
        if self.store is not None:
            pools = "; ".join(
                f"{facts.name}: {facts.object_size_bytes} bytes, {facts.form}" for facts in self.store.facts()
            )
            logger.info("HiCache pages go to mooncake-store at %s (%s)", self._address, pools)

    # ---- what SGLang asks for

    def num_leading(self, page_hashes: Sequence[str]) -> int:
        return self._ask(0, PageStore.num_leading, page_hashes)

    def restorable(self, page_hashes: Sequence[str], windows: Sequence[tuple[str, str, int]]) -> Restorable:
        """`windows`: (pool, hit policy, pages in its window). A policy that is not known here, or that does
        not bound the prefix (block_groups), gets no verdict."""
        judged = [window for window in windows if window[1] in POLICIES]
        return self._ask(NOTHING, PageStore.restorable, page_hashes, judged)

    def load(self, pool_name: str, page_hashes: Sequence[str], host_indices: Any) -> list[bool]:
        return self._ask([False] * len(page_hashes), PageStore.load, pool_name, page_hashes, host_indices)

    def save(
        self,
        pool_name: str,
        page_hashes: Sequence[str],
        host_indices: Any,
        prefix_hashes: Sequence[str] | None = None,
    ) -> list[bool]:
        return self._ask(
            [False] * len(page_hashes), PageStore.save, pool_name, page_hashes, host_indices, prefix_hashes
        )

    def load_flat(self, page_hashes: Sequence[str], tensors: Sequence[Any]) -> list[bool]:
        return self._ask([False] * len(page_hashes), _load_flat, page_hashes, tensors)

    def save_flat(self, page_hashes: Sequence[str], tensors: Sequence[Any]) -> list[bool]:
        return self._ask([False] * len(page_hashes), _save_flat, page_hashes, tensors)

    def clear(self) -> None:
        num_removed = self._ask(0, PageStore.clear)
        logger.info("removed %d objects from the store", num_removed)

    def close(self) -> None:
        self._ask(None, PageStore.close)

    def follow_weights(self) -> None:
        """Pages go by the weights that the engine serves now. Everything here does so by itself; it is for
        those who use `store`."""
        if self.store is not None and self._named_version != self._weights_version():
            self.guard.call(None, self._rename, self.store)

    def _rename(self, store: PageStore) -> None:
        with self._renaming:
            version = self._weights_version()
            if version == self._named_version:
                return
            # Without names until there are new ones, whatever happens meanwhile.
            store.rename(None)
            try:
                store.rename(self._identify())
                logger.info("the engine has new weights; its pages go by their name from now on")
            except ConfigError as error:
                logger.warning("HiCache stores nothing and finds nothing from now on: %s", error)
            finally:
                self._named_version = version

    def _ask(
        self, default: T, method: Callable[Concatenate[PageStore, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        self.follow_weights()
        store = self.store
        return default if store is None else self.guard.call(default, method, store, *args, **kwargs)

    def _count(self, name: str) -> None:
        self.errors_total += 1


def open_client(config: BackendConfig, client_name: str) -> StoreClient:
    """Waits for the first attempt to connect, two seconds at most, so that the first prompts find what is
    stored; without a store it goes on in the background."""
    options = {**config.client_options(), "client_name": client_name}
    try:
        return StoreClient.connect(config.store_address, **options)
    except RequestRefused:
        # Logged by the client, which asks again now and then: somebody may correct the store's tokens.
        return StoreClient(config.store_address, **options)


def _load_flat(store: PageStore, page_hashes: Sequence[str], tensors: Sequence[Any]) -> list[bool]:
    pool = store.pool(KV_POOL)
    if pool is None or len(tensors) != len(page_hashes):
        return [False] * len(page_hashes)
    return store.load_into(pool, page_hashes, [tensor_bytes(tensor) for tensor in tensors])


def _save_flat(store: PageStore, page_hashes: Sequence[str], tensors: Sequence[Any]) -> list[bool]:
    pool = store.pool(KV_POOL)
    if pool is None or len(tensors) != len(page_hashes):
        return [False] * len(page_hashes)
    # get_data_page flattens, which copies unless the page was contiguous already.
    return store.save_from(pool, page_hashes, [tensor_bytes(tensor.contiguous()) for tensor in tensors])
