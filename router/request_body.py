"""The fields of a completion request that the router reads."""

from typing import Any

import msgspec

_NO_RAW = msgspec.Raw(b"")


class Body(msgspec.Struct, frozen=True, gc=False):
    """All that the router reads of a completion request, in one pass over its bytes. Their types are the
    engine's to check: Any. `prompt`, `messages` and `tools` are their JSON, empty where there is none."""

    max_tokens: Any = None
    max_completion_tokens: Any = None
    priority: Any = None
    prompt: msgspec.Raw = _NO_RAW
    messages: msgspec.Raw = _NO_RAW
    tools: msgspec.Raw = _NO_RAW
    model: Any = None
    cache_salt: Any = None
    add_special_tokens: Any = None


NO_BODY = Body()
