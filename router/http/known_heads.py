"""A request head that comes again as it was before, but for the length it announces. Pure."""

import re
from typing import NamedTuple

# What is kept of each connection stays small.
_MAX_HEAD_BYTES = 4096
# Nine digits: what does not fit is parsed the long way, and refused there for its size.
_LENGTH = re.compile(rb"\r\ncontent-length: ?([0-9]{1,9})\r\n", re.IGNORECASE)


class SplitRequest(NamedTuple):
    """`key`: the head without the digits of its Content-Length, which are `length`."""

    key: bytes
    length: bytes
    body: bytes


def split_request(data: bytes) -> SplitRequest | None:
    """None unless `data` looks like exactly one request with a Content-Length.

    It may still be something else, or malformed: only that an equal key has been one is proof.
    """
    end = data.find(b"\r\n\r\n", 0, _MAX_HEAD_BYTES) + 4
    if end < 4:
        return None
    found = _LENGTH.search(data, 0, end)
    if found is None:
        return None
    length = found[1]
    if len(data) - end != int(length):
        return None
    start, stop = found.span(1)
    return SplitRequest(data[:start] + data[stop:end], length, data[end:])
