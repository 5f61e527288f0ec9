"""Token ids of texts seen before: whole texts, and prefixes in pieces, in bounded memory."""

import threading
from collections import OrderedDict
from collections.abc import Sequence

import msgspec
import xxhash

CHUNK_CHARS = 256
# dict entry, key, struct, bytes object
_ENTRY_SIZE_BYTES = 300


class Piece(msgspec.Struct, frozen=True, gc=False):
    """Of the chunk chain: token ids (u32) from the cut of the chunk before to this one's, which lies
    `cut_chars` from the beginning of the text."""

    cut_chars: int
    ids: bytes


def chunk_chain(text: str) -> list[int]:
    """A chained hash for each full chunk of CHUNK_CHARS. UnicodeEncodeError for lone surrogates."""
    chain: list[int] = []
    seed = 0
    for start in range(0, len(text) - CHUNK_CHARS + 1, CHUNK_CHARS):
        seed = xxhash.xxh3_64_intdigest(text[start : start + CHUNK_CHARS].encode(), seed)
        chain.append(seed)
    return chain


def text_key(text: str) -> bytes:
    return xxhash.xxh3_128_digest(text.encode())


class TokenCache:
    """Least recently used entries go first; of a chain the deepest. Safe for several threads."""

    def __init__(self, max_size_bytes: int) -> None:
        self._max_size_bytes = max_size_bytes
        self._size_bytes = 0
        self._entries: OrderedDict[int | bytes, Piece] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def whole(self, key: bytes) -> bytes | None:
        """Token ids of a whole text by its `text_key`."""
        with self._lock:
            found = self._entries.get(key)
            if found is None:
                return None
            self._entries.move_to_end(key)
            return found.ids

    def prefix(self, chain: Sequence[int]) -> list[Piece]:
        """The pieces of the longest known prefix, first to last."""
        pieces: list[Piece] = []
        entries = self._entries
        with self._lock:
            for link in chain:
                piece = entries.get(link)
                if piece is None:
                    break
                pieces.append(piece)
            for link in reversed(chain[: len(pieces)]):
                entries.move_to_end(link)
        return pieces

    def store(self, key: bytes, ids: bytes, links: Sequence[int], pieces: Sequence[Piece]) -> None:
        """A whole text, and the `pieces` of its `links` that were not known."""
        with self._lock:
            for link, piece in zip(reversed(links), reversed(pieces), strict=True):
                self._put(link, piece)
            self._put(key, Piece(0, ids))
            while self._size_bytes > self._max_size_bytes:
                _, dropped = self._entries.popitem(last=False)
                self._size_bytes -= len(dropped.ids) + _ENTRY_SIZE_BYTES

    def _put(self, key: int | bytes, piece: Piece) -> None:
        before = self._entries.pop(key, None)
        if before is not None:
            self._size_bytes -= len(before.ids) + _ENTRY_SIZE_BYTES
        self._entries[key] = piece
        self._size_bytes += len(piece.ids) + _ENTRY_SIZE_BYTES
