"""The engines named by flags or the configuration file."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from router.instance_spec import InstanceSpec


class StaticDiscovery:
    """On one event loop."""

    def __init__(self, specs: Sequence[InstanceSpec]) -> None:
        self._specs = specs
        self._changed = asyncio.Event()

    def replace(self, specs: Sequence[InstanceSpec]) -> None:
        """The configuration was read again."""
        self._specs = specs
        self._changed.set()

    async def changes(self) -> AsyncIterator[Sequence[InstanceSpec]]:
        while True:
            self._changed.clear()
            yield self._specs
            await self._changed.wait()
