"""The hash chain of prompts (core.block_hash) without hashing again what came before.

Prompts begin alike: system prompts, documents, the turns of a conversation so far. Hashing block by block
takes a call for each of hundreds; a span of blocks seen before is found by one hash of all its bytes.
"""

from __future__ import annotations

from router.core.block_hash import chain, xxh3

# Long ones first: a long prompt is found by few of them. Each is a multiple of the next.
SPANS_BLOCKS = (64, 16)
# Of each of two generations: 6 MB of hashes, for 6 MiB of text in blocks of 64 bytes.
MAX_SPANS = 8192


class ChainMemo:
    """Gives what `chain(data, block_bytes, seed, None)` does. Usable by several threads under the GIL: what
    they lose to each other is hashed again."""

    def __init__(self, block_bytes: int, max_spans: int = MAX_SPANS) -> None:
        self._block_bytes = block_bytes
        self._max_spans = max_spans
        # By the hash of a span and of all before it: the hashes of its blocks. What is not asked for while
        # the younger generation fills up is forgotten; that takes no order to be kept on each use.
        self._young: dict[int, list[int]] = {}
        self._old: dict[int, list[int]] = {}

    @property
    def num_spans(self) -> int:
        """Remembered, at most twice `max_spans`."""
        return len(self._young) + len(self._old)

    def hashes(self, data: bytes, seed: int) -> list[int]:
        """One for each full block of `data`."""
        hashes: list[int] = []
        self._add(hashes, data, seed, 0)
        return hashes

    def _add(self, hashes: list[int], data: bytes, block_hash: int, level: int) -> None:
        """Adds those of `data`, the chain being at `block_hash`. Spans before `level` were looked for."""
        if level == len(SPANS_BLOCKS):
            hashes += chain(data, self._block_bytes, block_hash, None)
            return
        span_bytes, start = self._block_bytes * SPANS_BLOCKS[level], 0
        for end in range(span_bytes, len(data) + 1, span_bytes):
            span = data[start:end]
            key = xxh3(span, block_hash)
            found = self._young.get(key)
            if found is None:
                found = self._old.get(key)
                if found is None:
                    found = []
                    self._add(found, span, block_hash, level + 1)
                self._keep(key, found)
            hashes += found
            block_hash, start = found[-1], end
        self._add(hashes, data[start:], block_hash, level + 1)

    def _keep(self, key: int, found: list[int]) -> None:
        if len(self._young) >= self._max_spans:
            self._old, self._young = self._young, {}
        self._young[key] = found
