"""What scheduling needs to know of a request, read from its headers and its body. Pure.

Of the body only these few fields are decoded; everything else is skipped over, checked no further than its
JSON syntax, and reaches the engine as it came.
"""

from typing import Any

import msgspec

from router.core.view import RequestView
from router.http.request import Request

GENERATES = frozenset({b"/v1/completions", b"/v1/chat/completions"})


class BadInput(Exception):
    """The client's mistake; the message tells it which."""


class _Hints(msgspec.Struct, frozen=True, gc=False):
    """Their types are the engine's to check: Any."""

    max_tokens: Any = None
    max_completion_tokens: Any = None
    priority: Any = None


_HINTS = msgspec.json.Decoder(_Hints)
_NO_HINTS = _Hints()
_MAX_INT64 = 2**63 - 1


def read_request_view(request_id: str, request: Request, *, generates: bool) -> RequestView:
    """`generates`: the body is a completion request and so must be a JSON object. Raises BadInput."""
    hints = _NO_HINTS
    if generates:
        try:
            hints = _HINTS.decode(request.body)
        except msgspec.DecodeError as error:
            raise BadInput(f"the request body cannot be read as a JSON object: {error}") from None
    headers = request.headers
    return RequestView(
        request_id,
        max_tokens=_count(hints.max_completion_tokens) or _count(hints.max_tokens),
        session_id=headers.get(b"x-session-id", b"").decode("latin-1"),
        priority=hints.priority if type(hints.priority) is int else 0,
        ttft_slo_ms=_slo_ms(headers, b"x-slo-ttft-ms"),
        tbt_slo_ms=_slo_ms(headers, b"x-slo-tpot-ms"),
    )


def _count(value: Any) -> int:
    return value if type(value) is int and 0 < value <= _MAX_INT64 else 0


def _slo_ms(headers: dict[bytes, bytes], name: bytes) -> float:
    text = headers.get(name)
    if text is None:
        return 0.0
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < float("inf"):
        raise BadInput(f"header {name.decode()}: {text.decode('latin-1')!r} is not a number of milliseconds")
    return value
