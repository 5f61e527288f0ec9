"""Names of KV blocks: a namespace digest followed by the engine's own chained block hash.

Two engines may share bytes only if everything that gives those bytes their meaning is equal, so all of it
goes into the namespace. A mismatch can then only be a miss, never wrong bytes. `block_key` is the single
function that makes keys for lookup, put and get.
"""

from collections.abc import Iterable

import msgspec
import xxhash

NAMESPACE_BYTES = 16
BLOCK_HASH_BYTES = 16
BLOCK_KEY_BYTES = NAMESPACE_BYTES + BLOCK_HASH_BYTES
_HALF_HASH_BYTES = BLOCK_HASH_BYTES // 2


class Namespace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that makes the bytes of a KV block incompatible with another engine's.

    `weights_id` identifies the weights (a revision, or a digest of the checkpoint's files), `engine_layout`
    the physical order of the bytes inside one block (attention backend layout; on CPU also its ISA packing),
    `hash_scheme` the recipe and seed behind the engine's block hashes. `block_size_tokens` is vLLM's
    block_size, `block_size_bytes` the size of one (rank, block, KV cache group) over all its layers.
    Ranks of a KV cache replicated over tensor-parallel ranks (MLA) are given as rank 0 of 1.
    """

    model: str
    weights_id: str
    kv_dtype: str
    engine: str
    engine_layout: str
    hash_scheme: str
    block_size_tokens: int
    block_size_bytes: int
    num_layers: int
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    group: int = 0
    tenant: str = "default"

    def digest(self) -> bytes:
        """16 bytes, stable across processes, machines and Python versions (field names are part of it)."""
        return xxhash.xxh3_128_digest(msgspec.json.encode(self, order="deterministic"))


def block_key(namespace_digest: bytes, block_hash: bytes) -> bytes:
    """The 32-byte key of one block.

    Of hashes longer than 16 bytes the first and the last 8 are kept, because engines name a block in their
    KV events by one of these (SGLang by the first, vLLM by the last): so the store can name it the same way
    (kvcore/wire/events.py). Hashes shorter than 16 bytes are widened and cannot be told from a key.
    """
    if len(namespace_digest) != NAMESPACE_BYTES:
        raise ValueError(f"a namespace digest has {NAMESPACE_BYTES} bytes, not {len(namespace_digest)}")
    if len(block_hash) < BLOCK_HASH_BYTES:
        return namespace_digest + xxhash.xxh3_128_digest(block_hash)
    return namespace_digest + block_hash[:_HALF_HASH_BYTES] + block_hash[-_HALF_HASH_BYTES:]


def block_keys(namespace_digest: bytes, block_hashes: Iterable[bytes]) -> list[bytes]:
    return [block_key(namespace_digest, block_hash) for block_hash in block_hashes]


def variant_namespace(namespace_digest: bytes, variant: bytes) -> bytes:
    """The digest of blocks that the same engine computed with other weights than its checkpoint's alone.
    `variant` says with which; b"": with those."""
    return xxhash.xxh3_128_digest(namespace_digest + variant) if variant else namespace_digest


def namespace_of(key: bytes) -> bytes:
    """The namespace digest of a block key, also of one that a tenant's prefix stands before."""
    return key[-BLOCK_KEY_BYTES:-BLOCK_HASH_BYTES]


def object_namespace(tenant: str = "default") -> bytes:
    """The first 16 bytes of the keys of all named objects of one tenant."""
    return xxhash.xxh3_128_digest(b"object\0" + tenant.encode())


_DEFAULT_OBJECTS = object_namespace()


def object_key(name: str | bytes, namespace_digest: bytes = _DEFAULT_OBJECTS) -> bytes:
    """The key of a named object (the Mooncake-style put/get API): any name, hashed to 16 bytes."""
    raw = name.encode() if isinstance(name, str) else name
    return namespace_digest + xxhash.xxh3_128_digest(raw)


def object_keys(names: Iterable[str], namespace_digest: bytes = _DEFAULT_OBJECTS) -> list[bytes]:
    """`object_key` of many."""
    digest = xxhash.xxh3_128_digest
    return [namespace_digest + digest(name.encode()) for name in names]
