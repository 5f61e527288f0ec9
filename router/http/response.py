"""Whole responses built here (errors, health, metrics), in OpenAI's error shape where they are errors."""

from http import HTTPStatus
from typing import Any

import msgspec

JSON = b"application/json"
TEXT = b"text/plain; charset=utf-8"

# The names vLLM and OpenAI give to the kinds of error, by status.
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    417: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
}


class Response(msgspec.Struct, frozen=True):
    """`headers` are extra header lines, each ending in CRLF."""

    status: int
    body: bytes
    content_type: bytes = JSON
    headers: bytes = b""

    def encode(self, *, close: bool, with_body: bool = True) -> bytes:
        """The bytes on the wire; `with_body` False for answers to HEAD."""
        return b"HTTP/1.1 %d %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n%b%b\r\n%b" % (
            self.status,
            _reason(self.status),
            self.content_type,
            len(self.body),
            self.headers,
            b"connection: close\r\n" if close else b"",
            self.body if with_body else b"",
        )


def json_response(status: int, value: Any, headers: bytes = b"") -> Response:
    return Response(status, msgspec.json.encode(value), JSON, headers)


def error_body(status: int, message: str, code: str | None = None) -> bytes:
    """`{"error": {message, type, param, code}}`, as OpenAI's clients parse it."""
    kind = _ERROR_TYPES.get(status, "server_error")
    return msgspec.json.encode(
        {"error": {"message": message, "type": kind, "param": None, "code": code or status}}
    )


def error_response(status: int, message: str, *, code: str | None = None, headers: bytes = b"") -> Response:
    return Response(status, error_body(status, message, code), JSON, headers)


def stream_error_event(status: int, message: str) -> bytes:
    """One server-sent event that tells a streaming client why its stream ends here."""
    return b"data: " + error_body(status, message) + b"\n\n"


def _reason(status: int) -> bytes:
    try:
        return HTTPStatus(status).phrase.encode()
    except ValueError:
        return b"Unknown"
