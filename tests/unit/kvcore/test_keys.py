"""Keys of blocks: what goes into them, and what can be read off them again."""

import hashlib

import msgspec
import pytest

from kvcore.keys import (
    BLOCK_KEY_BYTES,
    Namespace,
    block_key,
    block_keys,
    namespace_of,
    object_key,
    object_keys,
    object_namespace,
)
from kvcore.wire.events import HashForm, block_hash_of_key, block_hash_u64

NAMESPACE = Namespace(
    model="m",
    weights_id="w",
    kv_dtype="bfloat16",
    engine="vllm",
    engine_layout="NHD",
    hash_scheme="sha256/0",
    block_size_tokens=16,
    block_size_bytes=4096,
    num_layers=2,
)
DIGEST = NAMESPACE.digest()
HASH = hashlib.sha256(b"block").digest()


def test_whatever_gives_bytes_their_meaning_changes_every_key() -> None:
    others = {
        msgspec.structs.replace(NAMESPACE, **{name: value}).digest()
        for name, value in [
            ("model", "n"),
            ("kv_dtype", "fp8"),
            ("tp_rank", 1),
            ("tenant", "t"),
            ("group", 1),
        ]
    }
    assert len(others | {DIGEST}) == 6 and all(len(digest) == 16 for digest in others)


def test_the_namespace_can_be_read_off_a_key_behind_a_tenants_prefix_too() -> None:
    key = block_key(DIGEST, HASH)
    assert namespace_of(key) == namespace_of(bytes(16) + key) == DIGEST


def test_a_long_hash_keeps_both_ends_that_engines_name_it_by() -> None:
    key = block_key(DIGEST, HASH)
    assert len(key) == BLOCK_KEY_BYTES and key.startswith(DIGEST)
    # vLLM publishes int(hash) & (2**64 - 1), SGLang the first eight bytes as a signed number.
    assert block_hash_of_key(key, HashForm.VLLM) == int.from_bytes(HASH, "big") & ((1 << 64) - 1)
    assert block_hash_of_key(key, HashForm.SGLANG) == int.from_bytes(HASH[:8], "big", signed=True)
    assert block_hash_of_key(key, HashForm.VLLM) == block_hash_u64(HASH)


def test_a_hash_of_16_bytes_is_kept_whole_and_a_shorter_one_widened() -> None:
    assert block_key(DIGEST, HASH[:16]) == DIGEST + HASH[:16]
    assert len(block_key(DIGEST, HASH[:8])) == BLOCK_KEY_BYTES
    assert block_key(DIGEST, HASH[:8]) != block_key(DIGEST, HASH[:9])


def test_keys_of_different_blocks_differ() -> None:
    hashes = [hashlib.sha256(bytes([number])).digest() for number in range(100)]
    assert len(set(block_keys(DIGEST, hashes))) == 100


def test_a_digest_of_another_size_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="16 bytes, not 3"):
        block_key(b"abc", HASH)


def test_named_objects_have_keys_of_the_same_size() -> None:
    assert len(object_key("name")) == BLOCK_KEY_BYTES
    assert object_key("name") == object_key(b"name") != object_key("other")


def test_named_objects_of_tenants_are_told_apart_by_the_first_half_of_their_keys() -> None:
    mine, default = object_namespace("mine"), object_namespace()
    assert object_key("name", mine)[:16] == mine != default == object_key("name")[:16]
    assert object_key("name", mine)[16:] == object_key("name")[16:]
    assert object_keys(["name", "ä"], mine) == [object_key("name", mine), object_key("ä", mine)]


def test_keys_are_the_same_in_every_version() -> None:
    """Blocks on SSD outlive the process that wrote them, and engines of several versions share one store."""
    assert DIGEST.hex() == "61a7435a38fa330ca161bc7cd0dbbc1f"
    assert block_key(DIGEST, HASH)[16:].hex() == "496aca80e4d8f29f600c08ca67326dee"
    assert block_key(DIGEST, b"short")[16:].hex() == "5ade052695251792127012d5e9dfde89"
    assert object_key("name").hex() == "e1a7b61164f56c22aad4ec422e7f06fcc96a918390b153ff53816205aaaa5e4a"
