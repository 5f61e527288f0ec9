"""Where a text may be cut so that its pieces tokenise as the whole does. Pure.

Byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM and their kin) splits a text into pre-tokens by a regular
expression, from left to right and without looking back, and merges only within them. So from the beginning
of a pre-token on, the tokens depend on what follows only, and a known prefix need not be encoded again up to
there. Which tokenizers work like that is read from tokenizer.json; all others are encoded whole.
"""

from collections.abc import Mapping, Sequence
from typing import Any

# A pre-token's end is decided by what stands after it: for whitespace by the whole run and the letter behind
# it. This many complete pre-tokens later nothing depends on it any more.
_SETTLED_PRE_TOKENS = 4
_LOOKS_BACK = ("(?<", "\\b", "\\B", "\\A", "\\G", "^")


def settled_margin_chars(tokenizer: Mapping[str, Any]) -> int | None:
    """How many characters before the end of a known text a cut must lie, so that no special token can reach
    across it; None when texts cannot be cut. `tokenizer`: the content of tokenizer.json."""
    if tokenizer["model"].get("type") != "BPE" or tokenizer["model"].get("dropout"):
        return None
    normalizer = tokenizer.get("normalizer")
    if normalizer is not None and normalizer["type"] != "NFC":
        return None
    added = tokenizer.get("added_tokens") or []
    if any(token["lstrip"] or token["rstrip"] or token["single_word"] for token in added):
        return None
    if not _splits_forward(tokenizer.get("pre_tokenizer")):
        return None
    return max((len(token["content"]) for token in added), default=0) + 2


def _splits_forward(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    if pre_tokenizer is None:
        return False
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    *before, last = steps
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        return False
    if not before:
        return bool(last["use_regex"])
    if len(before) > 1:
        return False
    (first,) = before
    if first["type"] == "Digits":
        return True
    if first["type"] != "Split" or first["behavior"] != "Isolated" or first["invert"] or last["use_regex"]:
        return False
    pattern = first["pattern"].get("Regex", "")
    # A caret that negates a class is no anchor.
    return not any(mark in pattern.replace("[^", "[") for mark in _LOOKS_BACK)


def last_cut(
    text: str, boundaries: Sequence[tuple[int, int]], known_chars: int, margin_chars: int
) -> tuple[int, int] | None:
    """The last safe one of `boundaries` ((character, token) where pre-tokens begin, ascending) of a text of
    which the first `known_chars` are fixed and the rest may be anything."""
    limit = known_chars - margin_chars
    low, high = 0, len(boundaries)
    while low < high:
        middle = (low + high) >> 1
        if boundaries[middle][0] <= limit:
            low = middle + 1
        else:
            high = middle
    for index in range(low - 1 - _SETTLED_PRE_TOKENS, -1, -1):
        cut = boundaries[index]
        # NFC composes marks with the letter before them; an ASCII character is no mark.
        if text[cut[0]].isascii():
            return cut
    return None
