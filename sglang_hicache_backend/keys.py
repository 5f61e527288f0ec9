"""The names of pages: a namespace for each pool of a rank, and the engine's page hash.

SGLang's page hash chains token ids, LoRA and salt (SGLang 0.5.23, get_hash_str); nothing of the model, its
weights, dtype, layout or parallelism is in it, so all of that goes into the namespace. Pure.
"""

from collections.abc import Sequence

import msgspec
import xxhash

from kvcore.keys import Namespace, block_key, block_keys

KV_POOL = "kv"
HASH_SCHEME = "sglang sha256 chain"


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What is the same for all pools and ranks. `engine` holds settings outside the checkpoint that change KV
    values (quantization, config overrides, draft model, the deployment's tag)."""

    architecture: str
    weights_id: str
    engine: str
    tenant: str = "default"


class RankFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Where this rank stands: from HiCacheStorageConfig. TP is the attention's (under DP attention, ranks of
    one group). `is_replicated`: all TP ranks hold the same KV (MLA)."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    dcp_rank: int = 0
    dcp_size: int = 1
    is_replicated: bool = False

    @property
    def is_writer(self) -> bool:
        """Of ranks that hold the same KV one saves it: the first one of each DCP shard."""
        return not self.is_replicated or self.tp_rank == self.dcp_rank


class PoolFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One pool of pages. `form` says in which order the bytes of an object lie: layout, layers, the sizes of
    the runs it is made of. `object_layers`: equal parts of an object that can be read one by one.
    `num_heads_split`: objects a page is cut into by heads, so that engines of other TP sizes find theirs
    among them (SGLang's tp_lcm_size)."""

    name: str
    kind: str
    dtype: str
    form: str
    page_size_tokens: int
    object_size_bytes: int
    num_layers: int
    object_layers: int = 1
    is_replicated: bool = False
    num_heads_split: int = 1


def pool_namespaces(engine: EngineFacts, rank: RankFacts, pool: PoolFacts) -> list[Namespace]:
    """One for each object of a page: usually one, more when pages are split by heads."""
    if pool.is_replicated:
        tp_ranks, tp_size = range(1), 1
    else:
        first = rank.tp_rank * pool.num_heads_split
        tp_ranks, tp_size = range(first, first + pool.num_heads_split), rank.tp_size * pool.num_heads_split
    context = f"attn_cp={rank.attn_cp_rank}/{rank.attn_cp_size} dcp={rank.dcp_rank}/{rank.dcp_size}"
    return [
        Namespace(
            model=engine.architecture,
            weights_id=engine.weights_id,
            kv_dtype=pool.dtype,
            engine=f"sglang {engine.engine}",
            engine_layout=f"pool={pool.name} {pool.kind} {pool.form} {context}",
            hash_scheme=HASH_SCHEME,
            block_size_tokens=pool.page_size_tokens,
            block_size_bytes=pool.object_size_bytes,
            num_layers=pool.num_layers,
            tp_rank=tp_rank,
            tp_size=tp_size,
            pp_rank=rank.pp_rank,
            pp_size=rank.pp_size,
            cp_rank=rank.attn_cp_rank * rank.dcp_size + rank.dcp_rank,
            cp_size=rank.attn_cp_size * rank.dcp_size,
            tenant=engine.tenant,
        )
        for tp_rank in tp_ranks
    ]


class PageKeys:
    """Makes the keys of one pool's pages; page-major where a page is several objects."""

    def __init__(self, namespaces: Sequence[Namespace], pool_name: str) -> None:
        self.digests = [namespace.digest() for namespace in namespaces]
        self._is_kv = pool_name == KV_POOL

    def __call__(self, page_hashes: Sequence[str]) -> list[bytes]:
        hashes = [self._hash(page_hash) for page_hash in page_hashes]
        if len(self.digests) == 1:
            return block_keys(self.digests[0], hashes)
        return [block_key(digest, page_hash) for page_hash in hashes for digest in self.digests]

    def _hash(self, page_hash: str) -> bytes:
        try:
            raw = bytes.fromhex(page_hash)
        except ValueError:
            raw = xxhash.xxh3_128_digest(page_hash.encode())
        # Whoever follows the store's KV events takes a page by this name for one that can be reused. A
        # window or a state alone cannot, so that other pools' pages go by names nobody knows.
        return raw if self._is_kv else xxhash.xxh3_128_digest(raw)
