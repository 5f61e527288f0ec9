"""What a source of engines is, and the form in which engines are written down by those that come as data."""

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Protocol

import msgspec

from kvcore.errors import ConfigError
from router.core.view import Role
from router.instance_spec import InstanceSpec, instance_url
from router.kv_events.source import parse_event_source


class Discovery(Protocol):
    def changes(self) -> AsyncIterator[Sequence[InstanceSpec]]:
        """Yields the whole list at least once, promptly, and again each time it changes. Runs in the event
        loop; cancelled when the router stops. Whoever cannot reach its source yields an empty list when it
        never could, else keeps the last one, and goes on trying."""
        ...


class EngineEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One engine in a file or in Redis. `kv_events` is ENDPOINT[,REPLAY], as for --kv-events; ranks of data
    parallel engines publish on the ports after those. `store`: host or address of the store it uses, where
    that is not one on its own host."""

    url: str
    role: Role = Role.MIXED
    bootstrap_port: int = 0
    data_parallel_size: int = 1
    kv_events: str = ""
    store: str = ""


def specs_of(entry: EngineEntry) -> Iterator[InstanceSpec]:
    """One for each rank. ConfigError for an entry that cannot be understood."""
    url = instance_url(entry.url)
    if not 0 <= entry.bootstrap_port <= 65535:
        raise ConfigError(f"engine {url}: bootstrap_port {entry.bootstrap_port} is no port")
    if entry.data_parallel_size < 1:
        raise ConfigError(
            f"engine {url}: data_parallel_size must be at least 1, not {entry.data_parallel_size}"
        )
    events = parse_event_source(entry.kv_events) if entry.kv_events else None
    if entry.data_parallel_size == 1:
        yield InstanceSpec(url, entry.role, None, entry.bootstrap_port, events, entry.store)
        return
    for rank in range(entry.data_parallel_size):
        of_rank = events.of_rank(rank) if events is not None else None
        yield InstanceSpec(url, entry.role, rank, entry.bootstrap_port, of_rank, entry.store)


def checked(entries: Iterable[EngineEntry]) -> list[InstanceSpec]:
    """ConfigError when the engines cannot all be routed to by one router."""
    specs: dict[str, InstanceSpec] = {}
    roles: set[Role] = set()
    for entry in entries:
        for spec in specs_of(entry):
            if spec.url in specs:
                raise ConfigError(f"engine {spec.url} is given twice; one engine has one role")
            specs[spec.url] = spec
            roles.add(spec.role)
    if Role.MIXED in roles and len(roles) > 1:
        raise ConfigError(
            "engines that do everything (--worker-urls, role mixed) cannot be mixed "
            "with prefill and decode engines"
        )
    return list(specs.values())
