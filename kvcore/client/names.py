"""From what users call a key to what the store does, and from many keys to what one message may carry."""

from collections.abc import Iterator, Sequence

from kvcore.keys import BLOCK_KEY_BYTES, object_key


def named(key: str | bytes) -> bytes:
    """The store's key of a name; 32 bytes are taken for a block key as they are."""
    if isinstance(key, bytes) and len(key) == BLOCK_KEY_BYTES:
        return key
    return object_key(key)


def named_all(keys: Sequence[str | bytes]) -> list[bytes]:
    """`named` for many, without a call for each key that is one already."""
    return [
        key if isinstance(key, bytes) and len(key) == BLOCK_KEY_BYTES else object_key(key) for key in keys
    ]


def key_runs(keys: list[bytes], max_keys: int) -> Iterator[list[bytes]]:
    """Cut to what one message may carry; nothing for no keys."""
    if len(keys) <= max_keys:
        return iter([keys] if keys else [])
    return (keys[first : first + max_keys] for first in range(0, len(keys), max_keys))


def key_runs_with_parents(
    keys: list[bytes], parents: Sequence[bytes], max_keys: int
) -> Iterator[tuple[list[bytes], list[bytes]]]:
    """`key_runs`, each with the parents of its keys; without any where none are given."""
    for run, first in zip(key_runs(keys, max_keys), range(0, len(keys), max_keys), strict=True):
        yield run, list(parents[first : first + len(run)])
