"""How engines stand in Redis, and which of them count. Pure.

One hash, a field for each engine URL. Its value says until when it counts, by the clock of the Redis server,
so clocks of hosts do not matter. A field that vanishes is no farewell (Redis may have been restarted empty):
the engine counts on until its time is over; only `has_left` ends it at once.
"""

from collections.abc import Mapping

import msgspec

from router.discovery.base import EngineEntry

# Fields whose time has been over for so long are removed from the hash.
FORGET_AFTER_MS = 600_000


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    entry: EngineEntry
    expires_unix_ms: int
    ttl_ms: int
    has_left: bool = False


_DECODER = msgspec.json.Decoder(Registration)
encode = msgspec.json.Encoder().encode


class _Known(msgspec.Struct):
    entry: EngineEntry
    ttl_s: float
    until: float  # of our own clock


class Roll:
    """`now`: seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self.num_malformed = 0

    def read(self, fields: Mapping[bytes, bytes], redis_now_ms: int, now: float) -> list[bytes]:
        """What the hash holds at this moment. Returns the fields to remove from it."""
        old = []
        for field, value in fields.items():
            try:
                found = _DECODER.decode(value)
            except msgspec.DecodeError:
                self.num_malformed += 1
                continue
            url, left_ms = found.entry.url, found.expires_unix_ms - redis_now_ms
            if left_ms < -FORGET_AFTER_MS:
                old.append(field)
            if found.has_left:
                self._known.pop(url, None)
            elif left_ms > 0:
                self._known[url] = _Known(found.entry, found.ttl_ms / 1e3, now + left_ms / 1e3)
        return old

    def reached_again(self, now: float) -> None:
        """Redis could not be asked for a while: whoever was known has one more time to live to show up."""
        for known in self._known.values():
            known.until = max(known.until, now + known.ttl_s)

    def entries(self, now: float) -> list[EngineEntry]:
        """Those that count, by URL."""
        self._known = {url: known for url, known in self._known.items() if known.until > now}
        return [known.entry for _, known in sorted(self._known.items())]
