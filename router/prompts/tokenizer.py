"""Texts to token ids as the engine does it, encoding only what is new after a known prefix."""

import json
from array import array
from pathlib import Path
from typing import Any

import tokenizers

from kvcore.errors import ConfigError
from router.prompts.boundaries import last_cut, settled_margin_chars
from router.prompts.token_cache import CHUNK_CHARS, Piece, TokenCache, chunk_chain, text_key


class Unfinished:
    """A text of which the tail is still to be encoded: `Tokenizer.finish`, on any thread."""

    def __init__(self, text: str, key: bytes, chain: list[int], pieces: list[Piece]) -> None:
        self.text = text
        self.key = key
        self.chain = chain
        self.pieces = pieces

    @property
    def num_new_chars(self) -> int:
        return len(self.text) - (self.pieces[-1].cut_chars if self.pieces else 0)


class Tokenizer:
    """Safe for several threads. Token ids are u32 arrays as bytes."""

    def __init__(self, definition: dict[str, Any], cache_size_bytes: int) -> None:
        """`definition`: the content of tokenizer.json. ConfigError when it is none."""
        self._cache = TokenCache(cache_size_bytes)
        try:
            whole = tokenizers.Tokenizer.from_str(json.dumps(definition))
            self._prefix_ids, self._suffix_ids = _wrapping(whole)
            # Its post-processor adds special tokens, which are added here, and may trim offsets.
            self._encoder = tokenizers.Tokenizer.from_str(json.dumps({**definition, "post_processor": None}))
            self._encoder.no_truncation()
            self._encoder.no_padding()
            self._margin_chars = settled_margin_chars(definition)
        except Exception as error:  # the tokenizers library raises bare Exception
            raise ConfigError(f"tokenizer.json cannot be used: {error}") from error

    @property
    def reuses_prefixes(self) -> bool:
        return self._margin_chars is not None

    def begin(self, text: str) -> bytes | Unfinished:
        """The ids if the text is known, else what is left to do. UnicodeEncodeError for lone surrogates."""
        key = text_key(text)
        known = self._cache.whole(key)
        if known is not None:
            return known
        chain = chunk_chain(text) if self._margin_chars is not None else []
        return Unfinished(text, key, chain, self._cache.prefix(chain))

    def finish(self, unfinished: Unfinished) -> bytes:
        """Releases the GIL while it encodes: about 0.4 us a new character."""
        text, pieces = unfinished.text, unfinished.pieces
        start = pieces[-1].cut_chars if pieces else 0
        encoding = self._encoder.encode(text[start:], add_special_tokens=False)
        tail = array("I", encoding.ids).tobytes()
        ids = b"".join([piece.ids for piece in pieces]) + tail
        links = unfinished.chain[len(pieces) :]
        new = self._new_pieces(text, start, len(pieces), len(links), encoding, tail) if links else []
        self._cache.store(unfinished.key, ids, links, new)
        return ids

    def encode(self, text: str) -> bytes:
        begun = self.begin(text)
        return begun if isinstance(begun, bytes) else self.finish(begun)

    def wrap(self, ids: bytes) -> bytes:
        """With the special tokens the model has around a prompt (add_special_tokens)."""
        return self._prefix_ids + ids + self._suffix_ids

    def _new_pieces(
        self, text: str, start: int, num_known: int, num_new: int, encoding: Any, tail: bytes
    ) -> list[Piece]:
        assert self._margin_chars is not None
        words, offsets = encoding.word_ids, encoding.offsets
        boundaries = [
            (start + offsets[i][0], i) for i in range(len(words)) if i == 0 or words[i] != words[i - 1]
        ]
        pieces: list[Piece] = []
        cut_chars, cut_token = start, 0
        for number in range(num_known + 1, num_known + num_new + 1):
            cut = last_cut(text, boundaries, number * CHUNK_CHARS, self._margin_chars)
            if cut is None or cut[0] < cut_chars:
                cut = (cut_chars, cut_token)
            pieces.append(Piece(cut[0], tail[cut_token * 4 : cut[1] * 4]))
            cut_chars, cut_token = cut
        return pieces


def load_tokenizer(path: Path, cache_size_bytes: int) -> Tokenizer:
    """From tokenizer.json or a directory that has one."""
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        definition = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"no tokenizer at {path}: {error}; give the model's directory or its tokenizer.json"
        ) from None
    if not isinstance(definition, dict) or "model" not in definition:
        raise ConfigError(f"{file} is not a tokenizer.json")
    return Tokenizer(definition, cache_size_bytes)


def _wrapping(tokenizer: Any) -> tuple[bytes, bytes]:
    """Ids of the special tokens before and after a text."""
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    wrapped = tokenizer.encode("a", add_special_tokens=True).ids
    for start in range(len(wrapped) - len(plain) + 1):
        if wrapped[start : start + len(plain)] == plain:
            after = wrapped[start + len(plain) :]
            return array("I", wrapped[:start]).tobytes(), array("I", after).tobytes()
    return b"", b""
