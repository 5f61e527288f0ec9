"""One complete client request as the rest of the router sees it."""

import msgspec


class Request(msgspec.Struct):
    """`headers` maps lower-case names to values (the last one wins) and is only for looking things up; what
    engines receive is `forward_lines`, the client's own header lines in their order and spelling, without the
    hop-by-hop ones, Host and Content-Length. `target` is the request target in origin form."""

    method: bytes
    target: bytes
    path: bytes
    headers: dict[bytes, bytes]
    forward_lines: bytes
    body: bytes
    keep_alive: bool
    is_http_1_0: bool


def expects_continue(request: Request) -> bool:
    """RFC 9110 section 10.1.1: to a client of HTTP/1.0 no interim response may be sent."""
    return b"expect" in request.headers and not request.is_http_1_0


def upstream_head(request: Request, first_lines: bytes, extra_lines: bytes, content_length: int) -> bytes:
    """The request head for an engine, ending in the empty line. `first_lines` (Host among them) and
    `extra_lines` end in CRLF."""
    return b"%b %b HTTP/1.1\r\n%b%b%bcontent-length: %d\r\n\r\n" % (
        request.method,
        request.target,
        first_lines,
        request.forward_lines,
        extra_lines,
        content_length,
    )
