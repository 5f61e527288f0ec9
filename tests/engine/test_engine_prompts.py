"""The router's tokens are the engine's: the same text, the same chat template, by vLLM's own libraries."""

import json
from array import array
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from router.prompts.chat_template import load_chat_template
from router.prompts.tokenizer import load_tokenizer

pytestmark = pytest.mark.engine

CONVERSATION = [
    {"role": "system", "content": "You are terse.\n"},
    {"role": "user", "content": "  Zürich, 日本語 🙂 in 12345 words? <|im_end|>"},
    {"role": "assistant", "content": "No."},
    {"role": "user", "content": "Then in two.\n\n\n"},
]


@pytest.mark.parametrize("turns", range(1, 5))
@pytest.mark.parametrize("generation_prompt", [True, False])
def test_chats(model: str, turns: int, generation_prompt: bool) -> None:
    messages = CONVERSATION[:turns]
    engine: Any = AutoTokenizer.from_pretrained(model)
    text = engine.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation_prompt)
    template = load_chat_template(Path(model), None)
    assert template is not None
    rendered = template.render({"messages": messages, "add_generation_prompt": generation_prompt})
    assert rendered == text
    tokenizer = load_tokenizer(Path(model), 1 << 20)
    ids = array("I", tokenizer.encode(rendered)).tolist()
    assert ids == engine.encode(text, add_special_tokens=False)


def test_completions_with_special_tokens_and_known_prefixes(model: str) -> None:
    engine: Any = AutoTokenizer.from_pretrained(model)
    tokenizer = load_tokenizer(Path(model), 1 << 20)
    text = ""
    for number in range(30):
        text += json.dumps(CONVERSATION[number % 4], ensure_ascii=number % 2 == 0) + " " * number
        ids = array("I", tokenizer.wrap(tokenizer.encode(text))).tolist()
        assert ids == engine.encode(text)
