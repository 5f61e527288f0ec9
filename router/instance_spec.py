"""An engine as discovery finds it."""

from enum import Enum
from urllib.parse import urlsplit

import msgspec

from kvcore.errors import ConfigError
from router.core.view import Role
from router.kv_events.source import EventSource

RANK_HEADER = b"x-data-parallel-rank"


def read_rank(text: bytes) -> int:
    """What stands in that header; -1 for what can be no rank, also for its number of digits."""
    return int(text) if text.isdigit() and len(text) < 10 else -1


class Health(str, Enum):
    UNKNOWN = "unknown"  # not probed yet; requests may go there, readiness does not count on it
    UP = "up"
    DOWN = "down"


class InstanceSpec(msgspec.Struct, frozen=True):
    """What discovery finds: one engine, or one data parallel rank of it, which is then an instance by itself.

    `base_url` has no trailing slash. `bootstrap_port` is where a prefill engine tells decode engines how to
    reach it (vLLM's MooncakeConnector, SGLang); 0: the configuration's. `events`: where it publishes KV
    events. `store`: host or address of the store it uses; "": one on its own host, if there is one.
    """

    base_url: str
    role: Role
    dp_rank: int | None = None
    bootstrap_port: int = 0
    events: EventSource | None = None
    store: str = ""

    @property
    def url(self) -> str:
        """What the instance is known by: its base URL, with "@rank" where ranks are steered."""
        return self.base_url if self.dp_rank is None else f"{self.base_url}@{self.dp_rank}"

    @property
    def rank_lines(self) -> bytes:
        """Header lines that send a request to this rank: vLLM reads the first (0.28 to 0.32, serving.py),
        SGLang the second (0.5.23, request_headers.py)."""
        if self.dp_rank is None:
            return b""
        return b"x-data-parallel-rank: %d\r\nx-override-routed-dp-rank: %d\r\n" % (self.dp_rank, self.dp_rank)


def parse_instance_url(url: str) -> tuple[str, int]:
    """Host and port of "http://host:port". ConfigError says what is wrong with anything else."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"engine URL {url!r}: {error}") from None
    if parts.scheme != "http":
        raise ConfigError(f"engine URL {url!r}: engines are reached over http://, not {parts.scheme}://")
    if not parts.hostname or parts.path not in ("", "/") or parts.query or parts.username:
        raise ConfigError(f"engine URL {url!r}: write it as http://HOST:PORT")
    return parts.hostname, port or 80


def instance_url(text: str) -> str:
    """An engine's URL in the one form it is known by."""
    host, port = parse_instance_url(text)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
