"""Puts the prefill engine's `cached_tokens` into an answer of the decode engine, without moving a byte.

A decode engine calls every token cached whose KV it was given, so clients would see a hit rate of 100%
(vllm-project/router#193). The smaller number is padded with spaces, as JSON allows after a number: lengths,
chunk sizes and everything else stay as the engine sent them.
"""

import re
from collections.abc import Callable

# Inside a string of JSON the quote after the name would be escaped, so text of the model never matches.
_NAME = b'"cached_tokens":'
_VALUE = re.compile(rb'("cached_tokens":\s*)(\d+)')
_OPEN_VALUE = re.compile(rb'"cached_tokens":\s*\d*$')


class CachedTokensFilter:
    """Between an engine and a client. `prefill_cached` says what the prefill engine had cached, None while
    that is not known; a number above the decode engine's own is not believed: it computed the prompt itself.
    """

    __slots__ = ("_held", "_prefill_cached", "_write")

    def __init__(self, write: Callable[[bytes], object], prefill_cached: Callable[[], int | None]) -> None:
        self._write = write
        self._prefill_cached = prefill_cached
        self._held = b""

    def write(self, data: bytes) -> None:
        if self._held:
            data, self._held = self._held + data, b""
        # The usual ends of what engines send at once: a whole event, a whole body.
        if data[-1:] not in (b"\n", b"}"):
            end = _unfinished(data)
            data, self._held = data[:end], data[end:]
        if _NAME in data:
            data = _VALUE.sub(self._replaced, data)
        if data:
            self._write(data)

    def flush(self) -> None:
        """The answer is over, complete or not."""
        held, self._held = self._held, b""
        if held:
            self._write(held)

    def _replaced(self, found: re.Match[bytes]) -> bytes:
        cached = self._prefill_cached()
        name, value = found.groups()
        if cached is None or cached >= int(value):
            return found.group()
        return name + str(cached).encode().ljust(len(value))


def _unfinished(data: bytes) -> int:
    """Where a name or a number begins that may go on in what comes next; the length when there is none."""
    found = _OPEN_VALUE.search(data[-64:])
    if found is not None:
        return max(len(data) - 64, 0) + found.start()
    for length in range(min(len(_NAME), len(data)), 0, -1):
        if data.endswith(_NAME[:length]):
            return len(data) - length
    return len(data)
