"""Header fields that concern one connection, which a proxy does not pass on (RFC 9110 section 7.6.1). Pure.

Requests and responses that have none of them, or no more than "Connection: keep-alive", never come here.
"""

from collections.abc import Sequence

_ALWAYS = frozenset({b"connection", b"keep-alive", b"proxy-connection", b"te", b"upgrade"})
# What says where a body ends stays, whoever names it: bodies go through as they come.
_FRAMING = frozenset({b"content-length", b"trailer", b"transfer-encoding"})


def fields_named(value: bytes) -> frozenset[bytes]:
    """By the value of a Connection header, in lower case; "close" and the like are among them."""
    return frozenset(option.strip().lower() for option in value.split(b","))


def lines_without(lines: Sequence[bytes], named: frozenset[bytes]) -> list[bytes]:
    """Of header lines."""
    return [line for line in lines if line.partition(b":")[0].lower() not in named]


def response_lines(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """What a client gets of an engine's headers, whose names are in lower case. That the connection closes
    after this response is true for the client's as well."""
    named = frozenset().union(*(fields_named(value) for name, value in headers if name == b"connection"))
    dropped = (named - _FRAMING) | _ALWAYS
    lines = [b"%b: %b\r\n" % header for header in headers if header[0] not in dropped]
    if b"close" in named:
        lines.append(b"connection: close\r\n")
    return b"".join(lines)
