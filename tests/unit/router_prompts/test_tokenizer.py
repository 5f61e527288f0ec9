"""Tokenising from a known prefix gives what tokenising the whole text gives."""

import copy
import json
from array import array
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvcore.errors import ConfigError
from router.prompts.boundaries import settled_margin_chars
from router.prompts.token_cache import CHUNK_CHARS, Piece, TokenCache, chunk_chain
from router.prompts.tokenizer import Tokenizer, Unfinished, load_tokenizer
from tests.unit.router_prompts.small_tokenizers import KINDS, SPECIAL, TEXTS, definition

CASES = [(kind, "") for kind in KINDS] + [("llama3", "NFC")]

# Made of what makes pre-tokens long, ambiguous or late to decide: runs, marks, halves of special tokens.
PIECES = st.one_of(
    st.sampled_from(
        [*TEXTS, *SPECIAL, "<|im_st", "art|>", "\n", "\r\n", "x", "'s", "'", "A", "a", "中", "\u0301"]
    ),
    st.tuples(
        st.sampled_from([" ", "\n", "\t", "A", "a", "7", "中", "-", "\u0301", "'l", "e\u0301", "\n ", "🙂"]),
        st.integers(1, 700),
    ).map(lambda run: run[0] * run[1]),
    st.text(max_size=30),
)
LONG_TEXTS = st.lists(PIECES, max_size=12).map("".join)


def whole(kind: str, normalizer: str, text: str) -> list[int]:
    found: list[int] = reference(kind, normalizer).encode(text, add_special_tokens=False).ids
    return found


_REFERENCES: dict[tuple[str, str], Any] = {}


def reference(kind: str, normalizer: str) -> Any:
    if (kind, normalizer) not in _REFERENCES:
        made = tokenizers.Tokenizer.from_str(json.dumps(definition(kind, normalizer)))
        _REFERENCES[kind, normalizer] = made
    return _REFERENCES[kind, normalizer]


@pytest.mark.parametrize(("kind", "normalizer"), CASES)
@settings(max_examples=60, deadline=None)
@given(shared=LONG_TEXTS, endings=st.lists(LONG_TEXTS, min_size=1, max_size=4))
@example(shared="\n" + " " * 900, endings=["x" * 300, "\n" + "y" * 300])
@example(shared="w " * 200 + "中中中" + "A" * 400, endings=["1" * 300, "b" * 300])
@example(shared="word " * 100 + "<|im_st", endings=["x" * 600, "art|>" + "y" * 600])
def test_texts_that_share_a_prefix(kind: str, normalizer: str, shared: str, endings: list[str]) -> None:
    tokenizer = Tokenizer(definition(kind, normalizer), 1 << 20)
    assert tokenizer.reuses_prefixes
    for ending in [*endings, *endings]:
        text = shared + ending
        try:
            text.encode()
        except UnicodeEncodeError:
            return
        assert array("I", tokenizer.encode(text)).tolist() == whole(kind, normalizer, text)


def test_only_what_is_new_is_encoded() -> None:
    tokenizer = Tokenizer(definition("llama3"), 1 << 20)
    text = " ".join(TEXTS) * 40
    first = tokenizer.begin(text)
    assert isinstance(first, Unfinished) and first.num_new_chars == len(text)
    tokenizer.finish(first)
    assert isinstance(tokenizer.begin(text), bytes)
    longer = tokenizer.begin(text + " and more")
    assert isinstance(longer, Unfinished) and longer.num_new_chars < 3 * CHUNK_CHARS
    other = tokenizer.begin("!" + text)
    assert isinstance(other, Unfinished) and other.num_new_chars == len(text) + 1


def changed(**changes: Any) -> dict[str, Any]:
    return {**copy.deepcopy(definition("llama3")), **changes}


def added(**changes: Any) -> list[dict[str, Any]]:
    return [{**definition("llama3")["added_tokens"][0], **changes}]


def split(pattern: str) -> dict[str, Any]:
    made = copy.deepcopy(definition("llama3")["pre_tokenizer"])
    made["pretokenizers"][0]["pattern"]["Regex"] = pattern
    return dict(made)


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "Prepend", "prepend": "_"}},
        {"pre_tokenizer": None},
        {
            "pre_tokenizer": {
                "type": "Metaspace",
                "replacement": "_",
                "prepend_scheme": "always",
                "split": True,
            }
        },
        {"pre_tokenizer": split(r"(?<=x)y|.")},
        {"pre_tokenizer": split(r"^a|.")},
        {"pre_tokenizer": split(r"\bword|.")},
        {"added_tokens": added(lstrip=True)},
        {"added_tokens": added(rstrip=True)},
        {"added_tokens": added(single_word=True)},
        {"model": {"type": "Unigram"}},
    ],
)
def test_tokenizers_that_look_back_are_never_cut(changes: dict[str, Any]) -> None:
    assert settled_margin_chars(definition("llama3")) == len("<|endoftext|>") + 2
    assert settled_margin_chars(changed(**changes)) is None


def test_special_tokens_around_a_prompt() -> None:
    bos = {"id": "<|endoftext|>", "ids": [2], "tokens": ["<|endoftext|>"]}
    parts = [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    processor = {
        "type": "TemplateProcessing",
        "single": parts,
        "pair": parts,
        "special_tokens": {bos["id"]: bos},
    }
    tokenizer = Tokenizer(changed(post_processor=processor), 1 << 20)
    ids = tokenizer.encode("hello")
    assert array("I", tokenizer.wrap(ids)).tolist() == [2, *array("I", ids)]
    plain = Tokenizer(definition("llama3"), 1 << 20)
    assert plain.wrap(ids) == ids


def test_the_cache_stays_within_its_size_and_forgets_the_deepest_first() -> None:
    cache = TokenCache(10 * 400)
    for number in range(50):
        cache.store(b"t%d" % number, b"x" * 100, [], [])
        assert cache.size_bytes <= 4000
    assert cache.whole(b"t49") == b"x" * 100 and cache.whole(b"t0") is None
    chain = list(range(1, 6))
    cache.store(b"long", b"y", chain, [Piece(number, b"z" * 100) for number in chain])
    for number in range(7):
        cache.store(b"u%d" % number, b"x" * 100, [], [])
    kept = cache.prefix(chain)
    assert 0 < len(kept) < 5 and [piece.cut_chars for piece in kept] == chain[: len(kept)]


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(UnicodeEncodeError):
        chunk_chain("\ud800" * CHUNK_CHARS)


def test_loading(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition("gpt2")))
    assert load_tokenizer(tmp_path, 1000).encode("abc") == load_tokenizer(
        tmp_path / "tokenizer.json", 1000
    ).encode("abc")
    with pytest.raises(ConfigError, match="give the model's directory"):
        load_tokenizer(tmp_path / "nowhere", 1000)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"not a tokenizer\.json"):
        load_tokenizer(tmp_path, 1000)
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "BPE"}}')
    with pytest.raises(ConfigError, match="cannot be used"):
        load_tokenizer(tmp_path, 1000)
