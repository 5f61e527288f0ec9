"""A request head that comes again as it was before, but for the length it announces. Pure."""

import re

# What is kept of each connection stays small.
_MAX_HEAD_BYTES = 4096
# Nine digits: what does not fit is parsed the long way, and refused there for its size.
_MAX_DIGITS = 9
_LENGTH = re.compile(rb"\r\ncontent-length: ?([0-9]{1,%d})\r\n" % _MAX_DIGITS, re.IGNORECASE)


class KnownHead:
    """Of a request that was parsed: what stands before and after the digits of its Content-Length."""

    __slots__ = ("after", "before")

    def __init__(self, before: bytes, after: bytes) -> None:
        self.before = before
        self.after = after

    def length_of(self, data: bytes) -> bytes:
        """The digits, when `data` is exactly one request with this head; else nothing."""
        before, after = self.before, self.after
        if not data.startswith(before):
            return b""
        start = len(before)
        stop = data.find(b"\r\n", start, start + _MAX_DIGITS + 2)
        digits = data[start:stop]
        if not digits.isdigit() or not data.startswith(after, stop):
            return b""
        return digits if len(data) - stop - len(after) == int(digits) else b""


def split_head(data: bytes) -> KnownHead | None:
    """None unless `data` looks like exactly one request with a Content-Length. It may still be something
    else, or malformed: that is for a parser to say."""
    end = data.find(b"\r\n\r\n", 0, _MAX_HEAD_BYTES) + 4
    if end < 4:
        return None
    found = _LENGTH.search(data, 0, end)
    if found is None or len(data) - end != int(found[1]):
        return None
    start, stop = found.span(1)
    return KnownHead(data[:start], data[stop:end])
