"""Where KV events come from, as a user writes it. Pure."""

import re
from urllib.parse import urlsplit

import msgspec

from kvcore.errors import ConfigError

_ENDPOINT = re.compile(r"@?(tcp://[^,=]+:\d+|(ipc|inproc)://[^,=]+)")


class EventSource(msgspec.Struct, frozen=True):
    """`endpoint` is connected to; with "@" before it we listen there and the publisher connects (as vLLM does
    when its endpoint is a plain address). `replay_endpoint` "": gaps cannot be closed."""

    endpoint: str
    replay_endpoint: str = ""

    @property
    def host(self) -> str:
        """Of a tcp endpoint; "" for others."""
        return urlsplit(self.endpoint.removeprefix("@")).hostname or ""


def parse_event_source(text: str) -> EventSource:
    """ "ENDPOINT[,REPLAY]"."""
    endpoint, comma, replay = text.partition(",")
    for part in (endpoint, replay) if comma else (endpoint,):
        if not _ENDPOINT.fullmatch(part):
            raise ConfigError(
                f"KV events from {text!r}: write tcp://HOST:PORT, or tcp://HOST:PORT,tcp://HOST:REPLAY_PORT"
            )
    if replay.startswith("@"):
        raise ConfigError(f"KV events from {text!r}: the engine listens on the replay endpoint, drop its @")
    return EventSource(endpoint, replay)


def parse_engine_source(text: str) -> tuple[str, EventSource]:
    """ "URL=ENDPOINT[,REPLAY]" as (URL as it was written, source)."""
    url, equals, rest = text.partition("=")
    if not equals or not url:
        raise ConfigError(f"--kv-events {text!r}: write URL=ENDPOINT[,REPLAY], the URL as in --worker-urls")
    return url, parse_event_source(rest)
