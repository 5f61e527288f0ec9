"""EndpointSlices of Kubernetes (discovery.k8s.io/v1) as engines. Pure.

An endpoint counts while it is ready: a pod that is being ended is not, so its engine gets no new requests and
finishes what it has. Ports are found by name: `bootstrap` is a prefill engine's bootstrap port, `kv-events`
and `kv-events-replay` are where it publishes KV events.
"""

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from kvcore.errors import ConfigError
from router.core.view import Role
from router.discovery.base import EngineEntry
from router.discovery.kubernetes_objects import Metadata, host_of, http_port, kv_events_at

SERVICE_LABEL = "kubernetes.io/service-name"


class _Conditions(msgspec.Struct, frozen=True):
    ready: bool | None = None


class _Endpoint(msgspec.Struct, frozen=True):
    addresses: list[str]
    conditions: _Conditions = _Conditions()


class _Port(msgspec.Struct, frozen=True):
    port: int | None = None
    name: str | None = None


class EndpointSlice(msgspec.Struct, frozen=True):
    metadata: Metadata
    endpoints: list[_Endpoint] | None = None
    ports: list[_Port] | None = None


def entries(slices: Iterable[EndpointSlice], roles: Mapping[str, Role], port: str) -> list[EngineEntry]:
    """`roles` by Service; `port`: name or number of the engines' HTTP port, "" for the first. By URL; an
    endpoint that stands in two slices for a moment is one engine."""
    found = {entry.url: entry for one in slices for entry in _of_slice(one, roles, port)}
    return [entry for _, entry in sorted(found.items())]


def _of_slice(one: EndpointSlice, roles: Mapping[str, Role], port: str) -> Iterator[EngineEntry]:
    role = roles.get((one.metadata.labels or {}).get(SERVICE_LABEL, ""))
    numbers = {p.name or "": p.port for p in one.ports or () if p.port}
    if role is None or not numbers:
        return
    number = http_port(numbers, port)
    if number is None:
        raise ConfigError(f"EndpointSlice {one.metadata.name} has no port {port!r}: {', '.join(numbers)}")
    for endpoint in one.endpoints or ():
        if endpoint.conditions.ready is False or not endpoint.addresses:
            continue
        host = host_of(endpoint.addresses[0])
        yield EngineEntry(
            url=f"http://{host}:{number}",
            role=role,
            bootstrap_port=numbers.get("bootstrap") or 0,
            kv_events=kv_events_at(host, numbers),
        )
