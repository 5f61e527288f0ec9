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


class _Target(msgspec.Struct, frozen=True):
    uid: str = ""


class _Endpoint(msgspec.Struct, frozen=True):
    addresses: list[str]
    targetRef: _Target | None = None
    conditions: _Conditions = _Conditions()


class _Port(msgspec.Struct, frozen=True):
    port: int | None = None
    name: str | None = None


class EndpointSlice(msgspec.Struct, frozen=True):
    metadata: Metadata
    addressType: str = "IPv4"
    endpoints: list[_Endpoint] | None = None
    ports: list[_Port] | None = None


def entries(slices: Iterable[EndpointSlice], roles: Mapping[str, Role], port: str) -> list[EngineEntry]:
    """`roles` by Service; `port`: name or number of the engines' HTTP port, "" for the first. By URL; an
    endpoint that stands in two slices for a moment is one engine, and so is a pod of two address families,
    which has a slice for each: its IPv4 address counts."""
    found: dict[str, EngineEntry] = {}
    for one in sorted(slices, key=lambda one: one.addressType != "IPv4"):
        for name, entry in _of_slice(one, roles, port):
            found.setdefault(name, entry)
    return sorted({entry.url: entry for entry in found.values()}.values(), key=lambda entry: entry.url)


def _of_slice(one: EndpointSlice, roles: Mapping[str, Role], port: str) -> Iterator[tuple[str, EngineEntry]]:
    """With a name that does not depend on the address: pod and port, as far as it is a pod."""
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
        entry = EngineEntry(
            url=f"http://{host}:{number}",
            role=role,
            bootstrap_port=numbers.get("bootstrap") or 0,
            kv_events=kv_events_at(host, numbers),
        )
        pod = endpoint.targetRef.uid if endpoint.targetRef is not None else ""
        yield f"{pod}:{number}" if pod else entry.url, entry
