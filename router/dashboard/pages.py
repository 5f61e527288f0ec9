"""GET /dashboard and what belongs to it. The page itself holds no data, so it needs no key; its data does."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

from router.dashboard.document import document
from router.http.request import Request
from router.http.response import Response, error_response, json_response

if TYPE_CHECKING:
    from router.app import Router

PATH = b"/dashboard"
DATA_PATH = b"/dashboard/data"
_STATIC = b"/dashboard/static/"
# Nothing from elsewhere, nothing inline, in nobody's frame.
_HEADERS = (
    b"content-security-policy: default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    b"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'\r\n"
    b"x-content-type-options: nosniff\r\nreferrer-policy: no-referrer\r\ncache-control: no-cache\r\n"
)
_TYPES = {
    "html": b"text/html; charset=utf-8",
    "css": b"text/css; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "svg": b"image/svg+xml",
}


def is_ours(path: bytes) -> bool:
    return path == PATH or path.startswith(b"/dashboard/")


def respond(router: Router, request: Request) -> Response:
    """The answer to a GET of one of our paths; whether the client may ask is the caller's to check."""
    path = request.path
    if path == DATA_PATH:
        return json_response(
            200, document(router, _row_number(request.target)), b"cache-control: no-store\r\n"
        )
    name = "index.html" if path == PATH else path.removeprefix(_STATIC).decode("latin-1")
    content = _static_files().get(name)
    if content is None:
        return error_response(404, f"GET {path.decode('latin-1')}: there is no such endpoint")
    return Response(200, content, _TYPES[name.rpartition(".")[2]], _HEADERS)


@cache
def _static_files() -> dict[str, bytes]:
    """All of them, by name: what a client asks for is never a path on our disk."""
    folder = resources.files("router.dashboard") / "static"
    return {
        entry.name: entry.read_bytes()
        for entry in folder.iterdir()
        if entry.name.rpartition(".")[2] in _TYPES
    }


def _row_number(target: bytes) -> int:
    """Of ?after=N; anything else means from the beginning."""
    values = parse_qs(urlsplit(target.decode("latin-1")).query).get("after", ["0"])
    return int(values[0]) if values[0].isascii() and values[0].isdigit() and len(values[0]) < 16 else 0
