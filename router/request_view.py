"""What scheduling needs to know of a request, read from its headers and its body. Pure.

Of the body only these few fields are decoded; everything else is skipped over, checked no further than its
JSON syntax, and reaches the engine as it came.
"""

from typing import Any

import msgspec

from router.core.view import RequestView
from router.http.request import Request
from router.request_body import NO_BODY, Body

GENERATES = frozenset({b"/v1/completions", b"/v1/chat/completions"})


class BadInput(Exception):
    """The client's mistake; the message tells it which."""


_BODY = msgspec.json.Decoder(Body)
_MAX_INT64 = 2**63 - 1


def read_body(raw: bytes) -> Body:
    """Of a completion request, which must be a JSON object. Raises BadInput."""
    try:
        return _BODY.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadInput(f"the request body cannot be read as a JSON object: {error}") from None


def read_request_view(request_id: str, request: Request, body: Body = NO_BODY) -> RequestView:
    """All but the prompt. Raises BadInput for a header."""
    headers = request.headers
    session_id = headers.get(b"x-session-id")
    return RequestView(
        request_id,
        max_tokens=_count(body.max_completion_tokens) or _count(body.max_tokens),
        session_id=session_id.decode("latin-1") if session_id is not None else "",
        priority=body.priority if type(body.priority) is int else 0,
        ttft_slo_ms=_slo_ms(headers, b"x-slo-ttft-ms") if b"x-slo-ttft-ms" in headers else 0.0,
        tbt_slo_ms=_slo_ms(headers, b"x-slo-tpot-ms") if b"x-slo-tpot-ms" in headers else 0.0,
    )


def _count(value: Any) -> int:
    return value if type(value) is int and 0 < value <= _MAX_INT64 else 0


def _slo_ms(headers: dict[bytes, bytes], name: bytes) -> float:
    text = headers[name]
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < float("inf"):
        raise BadInput(f"header {name.decode()}: {text.decode('latin-1')!r} is not a number of milliseconds")
    return value
