"""SGLang's host pools as pages that can be sent and received.

Three kinds: pages whose memory is used where it is (get_page_buffer_meta), pages that SGLang itself copies
out and in (get_data_page, set_from_flat_data_page; for pools that give no addresses in their layout), and the
pages of a pool that has no bytes at all. Written against the pools of SGLang 0.5.23,
srt/mem_cache/pool_host/.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from sglang_hicache_backend.keys import PoolFacts
from sglang_hicache_backend.layouts import HostMemory, LayoutError, grouped, tensor_bytes

Buffers = list[Sequence[memoryview]]
_BUFFER_NAMES = ("kv_buffer", "k_buffer", "v_buffer", "index_k_buffer", "index_k_scale_buffer")
# Where TP ranks hold the same KV, a recurrent state is sharded nevertheless, and so is a draft model's KV
# unless its attention is MLA, too (SGLang 0.5.23, HybridCacheController.should_backup).
_SHARDED_POOLS = ("mamba",)
_DRAFT_POOLS = ("draft", "draft_swa")
_REPLICATED_DRAFTS = ("MLATokenToKVPoolHost", "DeepSeekV4PagedHostPool")


class Incoming(Protocol):
    """Where pages are read to. `buffers`: one entry an object, page-major."""

    buffers: Buffers

    def place(self, page: int) -> None:
        """Its bytes have all arrived: puts them where the engine will look for them."""
        ...


class Pages(Protocol):
    """One pool. `facts` are what its keys are made of.

    `host_indices` are SGLang's: one index a token slot, page by page. LayoutError when they do not fit. The
    buffers that are returned are the engine's own memory where `copies` is False.
    """

    facts: PoolFacts
    copies: bool

    def outgoing(self, host_indices: Any, num_pages: int) -> Buffers: ...
    def incoming(self, host_indices: Any, num_pages: int) -> Incoming: ...


class InPlace:
    """Incoming bytes that are where they belong as soon as they have come."""

    def __init__(self, buffers: Buffers) -> None:
        self.buffers = buffers

    def place(self, page: int) -> None:
        pass


class RegionPages:
    """Pages used where they lie in the pool. `first_page`: the indices of the pool's first page, from which
    the sizes are learnt; `num_heads_split` > 1: pages of layout page_head, one object a group of heads."""

    copies = False

    def __init__(
        self, pool: Any, name: str, first_page: Any, *, is_replicated: bool, num_heads_split: int = 1
    ) -> None:
        self._pool = pool
        self._split = num_heads_split
        self._memory = HostMemory(_buffers(pool))
        self._slots_per_page = len(first_page)
        sizes_bytes = [len(run) for run in self._runs(first_page)]
        runs_per_object = len(sizes_bytes) // num_heads_split
        self.facts = _facts(
            pool,
            name,
            form=f"regions {'+'.join(map(str, sizes_bytes[:runs_per_object]))}",
            object_size_bytes=sum(sizes_bytes[:runs_per_object]),
            is_replicated=is_replicated,
            num_heads_split=num_heads_split,
        )

    def outgoing(self, host_indices: Any, num_pages: int) -> Buffers:
        _check_indices(host_indices, num_pages, self._slots_per_page)
        return grouped(self._runs(host_indices), num_pages * self._split)

    def incoming(self, host_indices: Any, num_pages: int) -> Incoming:
        return InPlace(self.outgoing(host_indices, num_pages))

    def _runs(self, host_indices: Any) -> list[memoryview]:
        if self._split > 1:
            meta = self._pool.get_split_heads_page_buffer_meta(host_indices, self._split)
        else:
            meta = self._pool.get_page_buffer_meta(host_indices)
        return self._memory.runs(*meta)


class FlatIncoming:
    def __init__(self, pool: Any, indices: list[int]) -> None:
        self._pool = pool
        self._indices = indices
        self._pages = [pool.get_dummy_flat_data_page() for _ in indices]
        self.buffers: Buffers = [[tensor_bytes(page)] for page in self._pages]

    def place(self, page: int) -> None:
        self._pool.set_from_flat_data_page(self._indices[page], self._pages[page])


class FlatPages:
    """Pages that SGLang copies to and from flat tensors."""

    copies = True

    def __init__(self, pool: Any, name: str, first_page: Any, *, is_replicated: bool) -> None:
        self._pool = pool
        self._slots_per_page = len(first_page)
        size_bytes = len(tensor_bytes(pool.get_dummy_flat_data_page()))
        self.facts = _facts(
            pool, name, form=f"flat {size_bytes}", object_size_bytes=size_bytes, is_replicated=is_replicated
        )

    def outgoing(self, host_indices: Any, num_pages: int) -> Buffers:
        pages = (self._pool.get_data_page(index) for index in self._page_indices(host_indices, num_pages))
        return [[tensor_bytes(page)] for page in pages]

    def incoming(self, host_indices: Any, num_pages: int) -> Incoming:
        return FlatIncoming(self._pool, self._page_indices(host_indices, num_pages))

    def _page_indices(self, host_indices: Any, num_pages: int) -> list[int]:
        _check_indices(host_indices, num_pages, self._slots_per_page)
        return [int(index) for index in host_indices[:: self._slots_per_page].tolist()]


class LogicalPages:
    """A pool that only hands out indices (DeepSeek V4's anchor): other pools hold all of its pages' bytes."""

    copies = False

    def __init__(self, pool: Any, name: str) -> None:
        self.facts = _facts(pool, name, form="none", object_size_bytes=0, is_replicated=True)

    def outgoing(self, host_indices: Any, num_pages: int) -> Buffers:
        return []

    def incoming(self, host_indices: Any, num_pages: int) -> Incoming:
        return InPlace([])


def open_pages(
    pool: Any,
    name: str,
    first_page: Any,
    *,
    is_replicated: bool,
    num_heads_split: int = 1,
    is_flat: bool = False,
) -> Pages:
    """The pages of a host pool, in place where it gives addresses in its layout. `is_flat`: SGLang will hand
    over flat pages of it (the generic interface). LayoutError for a pool that offers neither."""
    try:
        meta = pool.get_page_buffer_meta(first_page)
    except (ValueError, NotImplementedError):
        # layer_first of state pools and indexers, for example.
        meta = ()
    if meta is None:
        return LogicalPages(pool, name)
    if meta and not is_flat:
        return RegionPages(
            pool, name, first_page, is_replicated=is_replicated, num_heads_split=num_heads_split
        )
    try:
        return FlatPages(pool, name, first_page, is_replicated=is_replicated)
    except (ValueError, NotImplementedError) as error:
        raise LayoutError(f"{name}: SGLang gives its pages neither in place nor flat: {error}") from error


def pool_is_replicated(name: str, pool: Any, model_is_replicated: bool) -> bool:
    """Whether all TP ranks hold the same pages of this pool."""
    if not model_is_replicated or name in _SHARDED_POOLS:
        return False
    if name in _DRAFT_POOLS:
        return any(base.__name__ in _REPLICATED_DRAFTS for base in type(pool).__mro__)
    return True


def _facts(
    pool: Any,
    name: str,
    *,
    form: str,
    object_size_bytes: int,
    is_replicated: bool,
    num_heads_split: int = 1,
) -> PoolFacts:
    layers = f"layers={getattr(pool, 'start_layer', None)}-{getattr(pool, 'end_layer', None)}"
    tag = getattr(pool, "storage_format_tag", None)
    return PoolFacts(
        name=name,
        kind=type(pool).__name__ + (f" {tag}" if tag else ""),
        dtype=str(pool.dtype),
        form=f"{pool.layout} {layers} {form}",
        page_size_tokens=int(pool.page_size),
        object_size_bytes=object_size_bytes,
        num_layers=max(1, int(getattr(pool, "layer_num", 0) or 0)),
        is_replicated=is_replicated,
        num_heads_split=num_heads_split,
    )


def _buffers(pool: Any) -> list[Any]:
    """Every tensor that the pool may give addresses in."""
    listed = pool.get_hybrid_pool_buffer() if hasattr(pool, "get_hybrid_pool_buffer") else None
    found = [listed, *(getattr(pool, name, None) for name in _BUFFER_NAMES)]
    tensors = [item for each in found for item in (each if isinstance(each, (list, tuple)) else [each])]
    return [tensor for tensor in tensors if tensor is not None]


def _check_indices(host_indices: Any, num_pages: int, slots_per_page: int) -> None:
    if len(host_indices) != num_pages * slots_per_page:
        raise LayoutError(f"{len(host_indices)} slots for {num_pages} pages of {slots_per_page}")
