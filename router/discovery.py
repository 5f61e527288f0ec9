"""Where the list of engines comes from. A source yields the whole list each time it changes."""

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from router.instance import InstanceSpec


class Discovery(Protocol):
    def changes(self) -> AsyncIterator[Sequence[InstanceSpec]]:
        """Yields at least once, promptly. Runs in the event loop; cancelled when the router stops. Whoever
        cannot reach its source keeps the last list and goes on trying."""
        ...


class StaticDiscovery:
    """The engines named by flags or the file."""

    def __init__(self, specs: Sequence[InstanceSpec]) -> None:
        self._specs = specs

    async def changes(self) -> AsyncIterator[Sequence[InstanceSpec]]:
        yield self._specs
