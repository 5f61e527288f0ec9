"""Pages to and from the store: the plugin without SGLang.

SGLang uses one backend from three threads at once: one looks, one loads, one saves. Where pages travel over
the connection itself (tcp) each of them has its own, so that a question is not answered behind a hundred
megabytes of another thread's pages. Over shared memory one is enough, and maps the store's pool but once.
Nothing here raises for what the store or the network does, and every call ends within its deadline.
"""

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from kvcore.client.base import LayerwiseStore
from kvcore.keys import NAMESPACE_BYTES
from kvcore.transport.base import Transfer
from kvcore.wire.messages import KeyInfo, Status
from sglang_hicache_backend.config import BackendConfig
from sglang_hicache_backend.hits import PoolPages, Restorable, restorable_prefixes
from sglang_hicache_backend.keys import KV_POOL, EngineFacts, PageKeys, PoolFacts, RankFacts, pool_namespaces
from sglang_hicache_backend.pools import Pages
from sglang_hicache_backend.stats import TransferStats

# Somebody has stored it, or is about to.
_PRESENT = (Status.OK, Status.EXISTS, Status.PENDING)
_KEYS_PER_LISTING = 1000
CLEAR_TIMEOUT_S = 60.0


class PageClient(LayerwiseStore, Protocol):
    """What is needed of a StoreClient besides moving layers."""

    def batch_exists(self, keys: Sequence[bytes], *, timeout_ms: float | None = None) -> list[bool]: ...
    def list_keys(self, cursor: int = 0, limit: int = 1000) -> tuple[list[KeyInfo], int]: ...
    def batch_remove(self, keys: Sequence[bytes], *, force: bool = False) -> list[Status]: ...


class Pool(msgspec.Struct, frozen=True):
    """`pages` is None where the caller moves the bytes by itself (the linker)."""

    facts: PoolFacts
    keys: PageKeys
    pages: Pages | None

    @property
    def objects_per_page(self) -> int:
        return len(self.keys.digests)

    @property
    def is_empty(self) -> bool:
        """There are no bytes to move: other pools hold them."""
        return self.facts.object_size_bytes == 0


class PageStore:
    """The pages of one rank's pools. All methods may be called from any thread."""

    def __init__(
        self,
        connect: Callable[[str], PageClient],
        config: BackendConfig,
        engine: EngineFacts,
        rank: RankFacts,
        stats: TransferStats,
    ) -> None:
        """`connect` is given what a connection is for."""
        self._config = config
        self._engine: EngineFacts | None = engine
        self._rank = rank
        self._stats = stats
        self._registered: dict[str, tuple[PoolFacts, Pages | None]] = {}
        self._pools: dict[str, Pool] = {}
        self._naming = threading.Lock()
        self.loading = connect("load")
        is_shared = self.loading.counters()["plane"] == "shm"
        self.saving = self.loading if is_shared else connect("save")
        self.looking = self.loading if is_shared else connect("lookup")

    def add_pool(self, facts: PoolFacts, pages: Pages | None = None) -> None:
        """From now on, also in the place of one of the same name."""
        with self._naming:
            self._registered[facts.name] = (facts, pages)
            self._pools = self._named(self._engine)

    def rename(self, engine: EngineFacts | None) -> None:
        """From now on pages go by the names of this engine. None: everything is a miss, nothing is stored."""
        with self._naming:
            self._engine = engine
            self._pools = self._named(engine)

    def _named(self, engine: EngineFacts | None) -> dict[str, Pool]:
        if engine is None:
            return {}
        return {
            name: Pool(facts, PageKeys(pool_namespaces(engine, self._rank, facts), name), pages)
            for name, (facts, pages) in self._registered.items()
        }

    def pool(self, name: str) -> Pool | None:
        return self._pools.get(name)

    def facts(self) -> list[PoolFacts]:
        return [facts for facts, _ in self._registered.values()]

    # ---- looking

    def num_leading(self, page_hashes: Sequence[str]) -> int:
        """How many leading pages of the KV pool are stored. 0 where that pool has no bytes: nothing can be
        said without the others."""
        pool = self._pools.get(KV_POOL)
        if pool is None or pool.is_empty or not page_hashes:
            return 0
        found = self.looking.lookup(pool.keys(page_hashes), timeout_ms=self._config.lookup_timeout_ms)
        return found.num_hits // pool.objects_per_page

    def restorable(self, page_hashes: Sequence[str], windows: Sequence[tuple[str, str, int]]) -> Restorable:
        """Prefixes that the KV pool and all of `windows` can serve; each is (pool, hit policy, pages in its
        window)."""
        kv = self._pools.get(KV_POOL)
        is_logical = kv is not None and kv.is_empty and bool(windows)
        num_kv = len(page_hashes) if is_logical else self.num_leading(page_hashes)
        if num_kv == 0:
            return Restorable(0, {}, [])
        pools = [
            PoolPages(name, policy, num_trailing, self._present(name, page_hashes[:num_kv]))
            for name, policy, num_trailing in windows
        ]
        return restorable_prefixes(num_kv, pools)

    def _present(self, pool_name: str, page_hashes: Sequence[str]) -> list[bool]:
        pool = self._pools.get(pool_name)
        if pool is None:
            return [False] * len(page_hashes)
        if pool.is_empty:
            return [True] * len(page_hashes)
        timeout_ms = self._config.lookup_timeout_ms
        found = self.looking.batch_exists(pool.keys(page_hashes), timeout_ms=timeout_ms)
        return _whole_pages(found, pool.objects_per_page)

    # ---- moving

    def load(self, pool_name: str, page_hashes: Sequence[str], host_indices: Any) -> list[bool]:
        """Which pages have arrived in the slots of `host_indices`. What lies in the slots of the others is
        undefined. LayoutError when the slots do not fit the pages."""
        pool = self._pools.get(pool_name)
        if pool is None or pool.pages is None:
            return [False] * len(page_hashes)
        if pool.is_empty or not page_hashes:
            return [True] * len(page_hashes)
        incoming = pool.pages.incoming(host_indices, len(page_hashes))
        arrived = self.load_into(pool, page_hashes, incoming.buffers)
        if pool.pages.copies:
            for page, has_arrived in enumerate(arrived):
                if has_arrived:
                    incoming.place(page)
        return arrived

    def load_into(self, pool: Pool, page_hashes: Sequence[str], buffers: Sequence[Any]) -> list[bool]:
        """As `load`, into one buffer (or sequence of buffers) an object."""
        if pool.is_empty or not page_hashes:
            return [True] * len(page_hashes)
        started = time.monotonic()
        transfer = self.loading.read_layers(pool.keys(page_hashes), 0, 0, buffers)
        statuses = transfer.wait(self._config.load_timeout_ms)
        arrived = _whole_pages([status is Status.OK for status in statuses], pool.objects_per_page)
        num_arrived = arrived.count(True)
        self._stats.loaded(num_arrived, num_arrived * _page_bytes(pool), time.monotonic() - started)
        return arrived

    def start_layer(
        self, pool: Pool, page_hashes: Sequence[str], layer: int, buffers: Sequence[Any]
    ) -> Transfer:
        """Starts to read one of the pool's object layers; one buffer (or sequence of buffers) an object, left
        alone until the transfer has been waited for."""
        return self.loading.read_layers(pool.keys(page_hashes), layer, layer + 1, buffers)

    def save(
        self,
        pool_name: str,
        page_hashes: Sequence[str],
        host_indices: Any,
        prefix_hashes: Sequence[str] | None = None,
    ) -> list[bool]:
        """Which pages are stored, or on their way there from another engine. `prefix_hashes`: the pages
        before these, if SGLang tells. LayoutError when the slots do not fit the pages."""
        pool = self._pools.get(pool_name)
        if pool is None or pool.pages is None:
            return [False] * len(page_hashes)
        if self.need_not_save(pool) or not page_hashes:
            return [True] * len(page_hashes)
        buffers = pool.pages.outgoing(host_indices, len(page_hashes))
        return self.save_from(pool, page_hashes, buffers, prefix_hashes)

    def save_from(
        self,
        pool: Pool,
        page_hashes: Sequence[str],
        buffers: Sequence[Any],
        prefix_hashes: Sequence[str] | None = None,
    ) -> list[bool]:
        """As `save`, from one buffer (or sequence of buffers) an object, which must stay as they are until
        this returns."""
        if self.need_not_save(pool) or not page_hashes:
            return [True] * len(page_hashes)
        started = time.monotonic()
        keys = pool.keys(page_hashes)
        timeout_ms = self._config.save_timeout_ms
        parents = self._parents(pool, page_hashes, prefix_hashes)
        facts = pool.facts
        statuses = self.saving.reserve(
            keys, facts.object_size_bytes, facts.object_layers, parents=parents, timeout_ms=timeout_ms
        )
        granted = [index for index, status in enumerate(statuses) if status is Status.OK]
        if granted:
            mine = [keys[index] for index in granted]
            transfer = self.saving.write_layers(
                mine, 0, facts.object_layers, [buffers[index] for index in granted]
            )
            left_ms = timeout_ms - (time.monotonic() - started) * 1e3
            written = transfer.wait(max(1.0, left_ms))
            for index, status in zip(granted, written, strict=True):
                statuses[index] = status
            # Reserved and never written they would keep every other engine from storing them.
            lost = [key for key, status in zip(mine, written, strict=True) if status is not Status.OK]
            self.saving.abort(lost)
        num_written = sum(statuses[index] is Status.OK for index in granted)
        num_pages = num_written // pool.objects_per_page
        self._stats.saved(num_pages, num_written * facts.object_size_bytes, time.monotonic() - started)
        return _whole_pages([status in _PRESENT for status in statuses], pool.objects_per_page)

    def need_not_save(self, pool: Pool) -> bool:
        """Another rank holds, and saves, the very same pages."""
        return pool.is_empty or (pool.facts.is_replicated and not self._rank.is_writer)

    def _parents(
        self, pool: Pool, page_hashes: Sequence[str], prefix_hashes: Sequence[str] | None
    ) -> list[bytes]:
        """For eviction in the order of prefixes: of a KV page the page before it, of another pool's page the
        KV page it completes. b"" where it is not known."""
        kv = self._pools.get(KV_POOL)
        if kv is None or kv.is_empty or kv.objects_per_page != pool.objects_per_page:
            return []
        if pool is not kv:
            return kv.keys(page_hashes)
        first = kv.keys(prefix_hashes[-1:]) if prefix_hashes else [b""] * kv.objects_per_page
        return first + kv.keys(page_hashes[:-1])

    # ---- managing

    def clear(self) -> int:
        """Removes this rank's pages of all pools; other engines' stay. How many objects were removed."""
        digests = set(itertools.chain.from_iterable(pool.keys.digests for pool in self._pools.values()))
        give_up_at = time.monotonic() + CLEAR_TIMEOUT_S
        mine: list[bytes] = []
        cursor = 0
        while time.monotonic() < give_up_at:
            infos, cursor = self.saving.list_keys(cursor, _KEYS_PER_LISTING)
            mine += [info.key for info in infos if info.key[:NAMESPACE_BYTES] in digests]
            if cursor == 0:
                break
        return self.saving.batch_remove(mine).count(Status.OK) if mine else 0

    def close(self) -> None:
        for client in (self.looking, self.loading, self.saving):
            client.close()


def _whole_pages(objects: Sequence[bool], objects_per_page: int) -> list[bool]:
    if objects_per_page == 1:
        return list(objects)
    firsts = range(0, len(objects), objects_per_page)
    return [all(objects[first : first + objects_per_page]) for first in firsts]


def _page_bytes(pool: Pool) -> int:
    return pool.facts.object_size_bytes * pool.objects_per_page
