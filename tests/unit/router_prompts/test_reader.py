"""What scheduling is told of each kind of prompt."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from router.core.block_hash import block_hashes, root_seed
from router.core.view import RequestView
from router.http.request import Request
from router.prompts.config import PromptsConfig
from router.prompts.reader import PromptReader
from router.prompts.tokenizer import load_tokenizer
from router.request_view import read_body
from tests.unit.router_prompts.small_tokenizers import TEXTS, definition

LONG = " ".join(TEXTS) * 20


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition("llama3")))
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"
    )
    return tmp_path


def read(
    config: PromptsConfig, *bodies: Any, lora: tuple[str, ...] = ()
) -> tuple[list[RequestView], PromptReader]:
    reader = PromptReader(config, 16, lora)

    async def all_of_them() -> list[RequestView]:
        views = []
        for body in bodies:
            raw = body if isinstance(body, bytes) else json.dumps(body).encode()
            request = Request(b"POST", b"/", b"/v1/completions", {}, b"", raw, True, False)
            found = reader.read(RequestView("r", max_tokens=5), request, read_body(raw))
            views.append(await found if isinstance(found, asyncio.Future) else found)
        return views

    views = asyncio.run(all_of_them())
    reader.close()
    assert all(view.max_tokens == 5 and view.request_id == "r" for view in views)
    return views, reader


def ids_of(model: Path, text: str) -> list[int]:
    return list(memoryview(load_tokenizer(model, 1 << 20).encode(text)).cast("I"))


def test_token_ids_need_no_tokenizer() -> None:
    ids = list(range(40))
    (view, salted), reader = read(PromptsConfig(), {"prompt": ids}, {"prompt": ids, "cache_salt": "s"})
    assert view.prompt_tokens == 40 and view.block_hashes == block_hashes(ids, 16)
    assert salted.block_hashes == block_hashes(ids, 16, root_seed("", "s"))
    assert reader.counts == {"token_ids": 2}


def test_adapters_have_blocks_of_their_own() -> None:
    bodies = [{"prompt": list(range(16)), "model": name} for name in ("base", "adapter")]
    (base, adapter), _ = read(PromptsConfig(), *bodies, lora=("adapter",))
    assert base.block_hashes == block_hashes(range(16), 16)
    assert adapter.block_hashes == block_hashes(range(16), 16, root_seed("adapter"))


def test_texts_become_the_engines_tokens(model: Path) -> None:
    config = PromptsConfig(tokenizer=str(model))
    bodies = [{"prompt": "short text"}, {"prompt": LONG}, {"prompt": LONG}]
    (short, long, again), reader = read(config, *bodies)
    assert short.prompt_tokens == len(ids_of(model, "short text"))
    assert long.block_hashes == again.block_hashes == block_hashes(ids_of(model, LONG), 16)
    assert reader.counts == {"tokenized": 2, "cached": 1}


def test_chats_go_through_the_template(model: Path) -> None:
    messages = [{"role": "user", "content": TEXTS[0]}, {"role": "assistant", "content": TEXTS[1]}]
    (view,), _ = read(PromptsConfig(tokenizer=str(model)), {"messages": messages})
    ids = ids_of(model, f"<|im_start|>{TEXTS[0]}<|im_start|>{TEXTS[1]}")
    assert view.prompt_tokens == len(ids) and view.block_hashes == block_hashes(ids, 16)


def test_without_a_tokenizer_equal_beginnings_have_equal_blocks() -> None:
    turns = [{"role": "user", "content": LONG}, {"role": "assistant", "content": "yes"}]
    (one, two, other), reader = read(
        PromptsConfig(),
        {"messages": turns[:1]},
        {"messages": turns},
        {"messages": turns, "tools": [{"type": "function"}]},
    )
    shared = len(one.block_hashes) - 1
    assert shared > 10 and list(two.block_hashes[:shared]) == list(one.block_hashes[:shared])
    assert other.block_hashes[0] != one.block_hashes[0]
    assert one.prompt_tokens == len(json.dumps(turns[:1])) // 4
    assert reader.counts == {"text": 3}


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": 5},
        {"prompt": [1, -1]},
        {"prompt": [1, 2**32]},
        {"prompt": ["several", "texts"]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    ],
)
def test_prompts_of_which_nothing_can_be_said_are_routed_by_load(model: Path, body: Any) -> None:
    (view,), reader = read(PromptsConfig(tokenizer=str(model)), body)
    assert view.block_hashes == () and view.prompt_tokens >= 1
    assert reader.counts == {"unknown": 1}
