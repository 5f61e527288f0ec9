"""How prompts are read: the [prompts] table of router.toml."""

from typing import Annotated

import msgspec
from msgspec import Meta


class PromptsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tokenizer: Annotated[
        str,
        Meta(
            description="the model's directory or its tokenizer.json; without it prompts are matched as text"
        ),
    ] = ""
    chat_template: Annotated[
        str, Meta(description="a .jinja file, if the engines do not use that of the model's directory")
    ] = ""
    cache_size_bytes: Annotated[int, Meta(gt=0, description="memory for the tokens of texts seen before")] = (
        256 << 20
    )
    threads: Annotated[int, Meta(gt=0, description="that tokenise, beside the event loop")] = 2
    text_bytes_per_token: Annotated[
        float, Meta(gt=0, description="to guess lengths by, without a tokenizer")
    ] = 4.0
