"""Small real tokenizers of the kinds in use, trained here."""

import json
from functools import cache
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXTS = [
    "The quick brown fox jumps over the lazy dog's back, it's 12345 times; they'll see 2026-11-30.",
    "def f(x):\n    return {'a': [1, 2, 3]}\n\n\n   # two  spaces\t\ttabs\r\n",
    "Größe, naïve café, 日本語のテキスト, ελληνικά, ΑΒΓ 中中中ABC, emoji 🙂🙃",
]
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")


def byte_level(split: str = "", **options: Any) -> pre_tokenizers.PreTokenizer:
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split)
    if not split:
        return last
    first = pre_tokenizers.Split(Regex(split), options.get("behavior", "isolated"))
    return pre_tokenizers.Sequence([first, last])


KINDS: dict[str, Any] = {
    "gpt2": lambda: byte_level(),
    "llama3": lambda: byte_level(LLAMA3),
    "o200k": lambda: byte_level(O200K),
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
}


@cache
def definition(kind: str, normalizer: str = "") -> dict[str, Any]:
    """The content of a tokenizer.json."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = KINDS[kind]()
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer == "NFC":
        tokenizer.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=[AddedToken(token) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 4, trainer)
    made: dict[str, Any] = json.loads(tokenizer.to_str())
    return made
