"""Counts what passes through to a client, without looking into it."""

import re
from collections.abc import Callable

_EVENT = b"data: "
_USAGE = b'"completion_tokens":'
_COUNT = re.compile(rb" ?(\d+)")
# The usage stands at the end of an answer; what stands before it may be the model quoting one.
_TAIL_BYTES = 2048


class AnswerMeter:
    """Between an engine and a client, on a stream of server-sent events: `on_first_token` at the first.

    Engines send the response head before the first token is there, so the head tells nothing.
    """

    __slots__ = ("_on_first_token", "_write", "num_events")

    def __init__(self, write: Callable[[bytes], object], on_first_token: Callable[[], None]) -> None:
        self._write = write
        self._on_first_token = on_first_token
        self.num_events = 0

    def write(self, data: bytes) -> None:
        seen = data.count(_EVENT)
        if seen:
            if not self.num_events:
                self._on_first_token()
            self.num_events += seen
        self._write(data)


def count_output_tokens(last_data: bytes, num_events: int) -> int:
    """Of a complete answer: what its usage says, else about one a streamed event; 0: unknown.

    `last_data`: the bytes received last, whose end holds the usage if there is one.
    """
    start = last_data.rfind(_USAGE, max(0, len(last_data) - _TAIL_BYTES))
    found = _COUNT.match(last_data, start + len(_USAGE)) if start >= 0 else None
    if found is not None:
        return int(found[1])
    return max(num_events - 1, 0)  # the last one is [DONE]
