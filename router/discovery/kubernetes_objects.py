"""Objects of the Kubernetes API, as far as several kinds of them are alike."""

from collections.abc import Mapping
from typing import Generic, TypeVar

import msgspec

T = TypeVar("T")


class Metadata(msgspec.Struct, frozen=True):
    name: str = ""
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    resourceVersion: str = ""
    deletionTimestamp: str | None = None


class ListMetadata(msgspec.Struct, frozen=True):
    resourceVersion: str = ""


class ObjectList(msgspec.Struct, Generic[T], frozen=True):
    metadata: ListMetadata
    items: list[T]


class WatchEvent(msgspec.Struct, frozen=True):
    """`object` is one of what is watched, or for BOOKMARK one of which only the version counts, or for ERROR
    a Status."""

    type: str
    object: msgspec.Raw


def http_port(numbers: Mapping[str, int], wanted: str) -> int | None:
    """Of ports by name: the one of that name or number, "" for the first. None: there is no such port."""
    if wanted.isdigit():
        return int(wanted)
    if not wanted:
        return next(iter(numbers.values()), None)
    return numbers.get(wanted)


def kv_events_at(host: str, numbers: Mapping[str, int]) -> str:
    """ENDPOINT[,REPLAY] of an engine with ports `kv-events` and `kv-events-replay`; "" without."""
    if "kv-events" not in numbers:
        return ""
    ports = (numbers.get(name) for name in ("kv-events", "kv-events-replay"))
    return ",".join(f"tcp://{host}:{port}" for port in ports if port)


def host_of(address: str) -> str:
    """As it stands in a URL."""
    return f"[{address}]" if ":" in address else address
