"""From a request's body to what scheduling needs of its prompt: how long it is and its chain of block hashes.

Token ids sent by the client are taken as they are. Texts are tokenised as the engine does it when there is a
tokenizer. Without one the chain runs over the bytes of the request's JSON: enough to send equal beginnings to
one place, not to match KV events. A prompt of which nothing can be said (images, a broken template) is routed
by load; it is never refused here, for what is wrong with it the engine says better.
"""

import asyncio
from collections import Counter
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from router.core.block_hash import TOKEN_BYTES, block_hashes, root_seed
from router.core.chain_memo import ChainMemo
from router.core.view import RequestView
from router.http.request import Request
from router.prompts.chat_template import ChatTemplate, NotText, load_chat_template
from router.prompts.config import PromptsConfig
from router.prompts.tokenizer import Tokenizer, Unfinished, load_tokenizer
from router.request_body import Body

# Shorter tails take less time than handing them to another thread and back.
_INLINE_CHARS = 512
# Prompts waiting to be encoded. Beyond that tokenising is the bottleneck, and routing by load is better.
_MAX_WAITING = 256


_TOKEN_IDS = msgspec.json.Decoder(list[Annotated[int, Meta(ge=0, lt=2**32)]])
_STRING = msgspec.json.Decoder(str)


class PromptReader:
    """On the event loop's thread; texts are encoded on others. `lora_names`: models that are adapters, whose
    KV is not the base model's."""

    def __init__(self, config: PromptsConfig, block_size_tokens: int, lora_names: Collection[str]) -> None:
        """ConfigError when the tokenizer or the template cannot be used."""
        self.counts: Counter[str] = Counter()
        self._config = config
        self._block_size_tokens = block_size_tokens
        self._text_chains = ChainMemo(max(1, round(block_size_tokens * config.text_bytes_per_token)))
        self._token_chains = ChainMemo(block_size_tokens * TOKEN_BYTES)
        self._lora_names = lora_names
        self._tokenizer: Tokenizer | None = None
        self._template: ChatTemplate | None = None
        self._executor: ThreadPoolExecutor | None = None
        self.num_waiting = 0
        if config.tokenizer:
            path = Path(config.tokenizer)
            self._tokenizer = load_tokenizer(path, config.cache_size_bytes)
            own = Path(config.chat_template) if config.chat_template else None
            self._template = load_chat_template(path if path.is_dir() else path.parent, own)
            self._executor = ThreadPoolExecutor(config.threads, thread_name_prefix="tokenize")

    def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)

    def read(
        self, view: RequestView, request: Request, body: Body
    ) -> "RequestView | asyncio.Future[RequestView]":
        """The view with its prompt, or without one; at once or, for texts that take long, later. `body` is
        what was read of the request's."""
        try:
            return self._read(view, request, body)
        except (msgspec.DecodeError, RecursionError, UnicodeEncodeError, NotText):
            return self._unknown(view, request)

    def _read(
        self, view: RequestView, request: Request, body: Body
    ) -> "RequestView | asyncio.Future[RequestView]":
        seed = self._seed(body)
        is_chat = bool(body.messages)
        raw = bytes(body.messages or body.prompt)
        if not is_chat and raw[:1] == b"[" and raw[1:].lstrip()[:1] not in (b'"', b"["):
            ids = _TOKEN_IDS.decode(raw)
            self.counts["token_ids"] += 1
            return replace(
                view, prompt_tokens=len(ids), block_hashes=block_hashes(ids, self._block_size_tokens, seed)
            )
        if self._tokenizer is None:
            return self._as_text(view, bytes(body.tools) + raw if body.tools else raw, seed)
        if is_chat:
            if self._template is None:
                raise NotText("no chat template")
            text = self._template.render(msgspec.json.decode(request.body))
            wraps = body.add_special_tokens is True
        else:
            text = _STRING.decode(raw)
            wraps = body.add_special_tokens is not False
        return self._as_tokens(view, self._tokenizer, text, seed, wraps)

    def _seed(self, body: Body) -> int:
        lora = body.model if isinstance(body.model, str) and body.model in self._lora_names else ""
        return root_seed(lora, body.cache_salt if isinstance(body.cache_salt, str) else "")

    def _as_text(self, view: RequestView, raw: bytes, seed: int) -> RequestView:
        if not raw:
            raise NotText("no prompt")
        self.counts["text"] += 1
        return replace(
            view,
            prompt_tokens=max(1, int(len(raw) / self._config.text_bytes_per_token)),
            block_hashes=self._text_chains.hashes(raw, seed),
        )

    def _as_tokens(
        self, view: RequestView, tokenizer: Tokenizer, text: str, seed: int, wraps: bool
    ) -> "RequestView | asyncio.Future[RequestView]":
        def finished(ids: bytes) -> RequestView:
            whole = tokenizer.wrap(ids) if wraps else ids
            hashes = self._token_chains.hashes(whole, seed)
            return replace(view, prompt_tokens=len(whole) // TOKEN_BYTES, block_hashes=hashes)

        def finish(begun: Unfinished) -> RequestView:
            return finished(tokenizer.finish(begun))

        begun = tokenizer.begin(text)
        if isinstance(begun, bytes):
            self.counts["cached"] += 1
            return finished(begun)
        if begun.num_new_chars <= _INLINE_CHARS:
            self.counts["tokenized"] += 1
            return finish(begun)
        if self.num_waiting >= _MAX_WAITING:
            raise NotText("too many wait to be tokenised")
        self.counts["tokenized"] += 1
        self.num_waiting += 1
        assert self._executor is not None
        future = asyncio.get_running_loop().run_in_executor(self._executor, finish, begun)
        future.add_done_callback(self._one_less)
        return future

    def _one_less(self, future: "asyncio.Future[RequestView]") -> None:
        self.num_waiting -= 1

    def _unknown(self, view: RequestView, request: Request) -> RequestView:
        """Its length alone, guessed: admission needs something to go by."""
        self.counts["unknown"] += 1
        return replace(view, prompt_tokens=max(1, int(len(request.body) / self._config.text_bytes_per_token)))
