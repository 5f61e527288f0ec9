"""Where KV events come from, as a user writes it. Pure."""

import re
from urllib.parse import urlsplit

import msgspec

from kvcore.errors import ConfigError

_ENDPOINT = re.compile(r"@?(tcp://[^,=]+:\d+|(ipc|inproc)://[^,=]+)")


class EventSource(msgspec.Struct, frozen=True):
    """`endpoint` is connected to; with "@" before it we listen there and the publisher connects (as vLLM does
    when its endpoint is a plain address). `replay_endpoint` "": gaps cannot be closed. `store_address`: of a
    store node, where clients reach it; "": it is not asked for anything."""

    endpoint: str
    replay_endpoint: str = ""
    store_address: str = ""

    def of_rank(self, dp_rank: int) -> "EventSource":
        """That of one data parallel rank: vLLM and SGLang add the rank to the ports they were given."""
        return EventSource(_shifted(self.endpoint, dp_rank), _shifted(self.replay_endpoint, dp_rank))

    @property
    def host(self) -> str:
        """Of a tcp endpoint; "" for others."""
        return urlsplit(self.endpoint.removeprefix("@")).hostname or ""


def _shifted(endpoint: str, by: int) -> str:
    head, colon, port = endpoint.rpartition(":")
    return f"{head}{colon}{int(port) + by}" if port.isdigit() else endpoint


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


def parse_store_source(text: str) -> EventSource:
    """ "ENDPOINT[,REPLAY][=ADDRESS]"."""
    endpoints, equals, address = text.partition("=")
    if equals and not address:
        raise ConfigError(f"--store-kv-events {text!r}: after = comes the address of the store, HOST:PORT")
    source = parse_event_source(endpoints)
    return EventSource(source.endpoint, source.replay_endpoint, address)


def parse_engine_source(text: str) -> tuple[str, str]:
    """ "URL=ENDPOINT[,REPLAY]" as (URL as it was written, the rest, checked)."""
    url, equals, rest = text.partition("=")
    if not equals or not url:
        raise ConfigError(f"--kv-events {text!r}: write URL=ENDPOINT[,REPLAY], the URL as in --worker-urls")
    parse_event_source(rest)
    return url, rest
