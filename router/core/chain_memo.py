"""The hash chain of prompts (core.block_hash) without hashing again what came before.

Prompts begin alike: system prompts, documents, the turns of a conversation so far. Hashing block by block
takes a call for each of hundreds; a span of blocks seen before is found by one hash of all its bytes.
"""

from __future__ import annotations

from collections import OrderedDict

from router.core.block_hash import chain, xxh3

# Long ones first: a long prompt is found by few of them. Each is a multiple of the next.
SPANS_BLOCKS = (64, 16)
# 13 MB of hashes, for 13 MiB of text in blocks of 64 bytes.
MAX_SPANS = 16384


class ChainMemo:
    """Gives what `chain(data, block_bytes, seed, None)` does. Usable by several threads under the GIL: what
    they lose to each other is hashed again."""

    def __init__(self, block_bytes: int, max_spans: int = MAX_SPANS) -> None:
        self._block_bytes = block_bytes
        self._max_spans = max_spans
        # By the hash of a span and of all before it: the hashes of its blocks. Used last stand last.
        self._spans: OrderedDict[int, list[int]] = OrderedDict()

    @property
    def num_spans(self) -> int:
        """Remembered, at most `max_spans`."""
        return len(self._spans)

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
            found = self._spans.pop(key, None)
            if found is None:
                found = []
                self._add(found, span, block_hash, level + 1)
            self._spans[key] = found
            if len(self._spans) > self._max_spans:
                self._spans.popitem(last=False)
            hashes += found
            block_hash, start = found[-1], end
        self._add(hashes, data[start:], block_hash, level + 1)
