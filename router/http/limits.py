"""What one client may cost us: sizes, times and counts, checked before anything is allocated for it."""

from typing import Annotated

import msgspec
from msgspec import Meta


def _positive(text: str) -> Meta:
    return Meta(gt=0, description=text)


class HttpLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_header_bytes: Annotated[int, _positive("largest request head")] = 64 << 10
    max_body_bytes: Annotated[int, _positive("largest request body")] = 256 << 20
    max_connections: Annotated[int, _positive("open client connections; more are answered 503")] = 16384
    max_pipelined: Annotated[int, _positive("waiting requests at which a client is read no further")] = 16
    header_timeout_ms: Annotated[float, _positive("for a whole request head to arrive")] = 10_000
    body_grace_ms: Annotated[float, _positive("for the beginning of a body to arrive")] = 10_000
    min_body_bytes: Annotated[int, _positive("a body must arrive at this many bytes a second")] = 4096
    idle_timeout_ms: Annotated[float, _positive("connections without a request are closed")] = 75_000
    stall_timeout_ms: Annotated[float, _positive("clients that stop reading their answer are cut")] = 60_000
